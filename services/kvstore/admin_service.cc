#include "services/kvstore/admin_service.h"

#include "services/base/grpc_status.h"
#include "services/base/status.h"
#include "services/chunk/remote/chunk_wire.h"

namespace spl::kvstore {
namespace {

absl::StatusOr<NamespaceSettings> SettingsFromWire(const v1::NamespaceSettings& wire) {
  SPLICE_ASSIGN_OR_RETURN(const chunk::Pin pin, chunk::PinFromWire(wire.pin()));
  return NamespaceSettings{.name = wire.name(),
                           .owner = wire.owner(),
                           .quota_bytes = wire.quota_bytes(),
                           .quota_chunks = wire.quota_chunks(),
                           .ttl_seconds = wire.ttl_seconds(),
                           .is_public = wire.is_public(),
                           .pin = pin};
}

void ToWire(const Namespace::Stat& stat, v1::Namespace& wire) {
  wire.set_id(stat.row.id.data(), stat.row.id.size());
  v1::NamespaceSettings& settings = *wire.mutable_settings();
  settings.set_name(stat.row.settings.name);
  settings.set_owner(stat.row.settings.owner);
  settings.set_quota_bytes(stat.row.settings.quota_bytes);
  settings.set_quota_chunks(stat.row.settings.quota_chunks);
  settings.set_ttl_seconds(stat.row.settings.ttl_seconds);
  settings.set_is_public(stat.row.settings.is_public);
  settings.set_pin(static_cast<v1::Pin>(stat.row.settings.pin));
  wire.set_implicit(stat.implicit);
  wire.set_created_unix_ms(stat.row.created_ms);
  wire.set_chunks(stat.num_chunks);
  wire.set_bytes(stat.bytes);
}

}  // namespace

grpc::ServerUnaryReactor* AdminService::OnPool(grpc::CallbackServerContext* context,
                                               std::function<absl::Status()> work) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  if (!pool_.Submit([work = std::move(work), reactor] { reactor->Finish(ToGrpcStatus(work())); })) {
    reactor->Finish(ToGrpcStatus(Errorf(absl::StatusCode::kResourceExhausted, "too many calls are waiting")));
  }
  return reactor;
}

grpc::ServerUnaryReactor* AdminService::CreateNamespace(grpc::CallbackServerContext* context,
                                                        const v1::CreateNamespaceRequest* request,
                                                        v1::Namespace* response) {
  return OnPool(context, [=, this]() -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(const chunk::Digest id, chunk::NamespaceFromBytes(request->id()));
    SPLICE_ASSIGN_OR_RETURN(const NamespaceSettings settings, SettingsFromWire(request->settings()));
    SPLICE_ASSIGN_OR_RETURN(const Namespace::Stat stat, store_.namespaces().Create(id, settings));
    ToWire(stat, *response);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::ListNamespaces(grpc::CallbackServerContext* context,
                                                       const v1::ListNamespacesRequest* request,
                                                       v1::ListNamespacesResponse* response) {
  return OnPool(context, [=, this] {
    for (const Namespace::Stat& stat : store_.namespaces().List(request->owner())) {
      ToWire(stat, *response->add_namespaces());
    }
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::StatNamespace(grpc::CallbackServerContext* context,
                                                      const v1::StatNamespaceRequest* request,
                                                      v1::Namespace* response) {
  return OnPool(context, [=, this]() -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(const chunk::Digest id, chunk::NamespaceFromBytes(request->id()));
    SPLICE_ASSIGN_OR_RETURN(const Namespace::Stat stat, store_.namespaces().Stat(id));
    ToWire(stat, *response);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::SetNamespace(grpc::CallbackServerContext* context,
                                                     const v1::SetNamespaceRequest* request, v1::Namespace* response) {
  return OnPool(context, [=, this]() -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(const chunk::Digest id, chunk::NamespaceFromBytes(request->id()));
    SPLICE_ASSIGN_OR_RETURN(const NamespaceSettings settings, SettingsFromWire(request->settings()));
    SPLICE_ASSIGN_OR_RETURN(const Namespace::Stat stat, store_.namespaces().Set(id, settings));
    ToWire(stat, *response);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::DeleteNamespace(grpc::CallbackServerContext* context,
                                                        const v1::DeleteNamespaceRequest* request,
                                                        v1::DeleteNamespaceResponse* response) {
  return OnPool(context, [=, this]() -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(const chunk::Digest id, chunk::NamespaceFromBytes(request->id()));
    SPLICE_ASSIGN_OR_RETURN(const Namespace::Stat stat, store_.DeleteNamespace(id));
    response->set_chunks(stat.num_chunks);
    response->set_bytes(stat.bytes);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::SetPin(grpc::CallbackServerContext* context, const v1::SetPinRequest* request,
                                               v1::SetPinResponse* response) {
  return OnPool(context, [=, this]() -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(const std::vector<chunk::ChunkKey> keys, chunk::KeysFromWire(request->keys()));
    SPLICE_ASSIGN_OR_RETURN(const chunk::Pin pin, chunk::PinFromWire(request->pin()));
    if (request->has_namespace_id() != keys.empty()) {
      return InvalidArgument("SetPin takes keys or a namespace_id, and not both");
    }
    TieredStore::Pinned pinned;
    if (request->has_namespace_id()) {
      SPLICE_ASSIGN_OR_RETURN(const chunk::Digest id, chunk::NamespaceFromBytes(request->namespace_id()));
      SPLICE_ASSIGN_OR_RETURN(pinned, store_.SetNamespacePin(id, pin));
    } else {
      SPLICE_ASSIGN_OR_RETURN(pinned, store_.SetPin(keys, pin));
    }
    response->set_changed(pinned.num_changed);
    response->set_missing(pinned.num_missing);
    return absl::OkStatus();
  });
}

}  // namespace spl::kvstore
