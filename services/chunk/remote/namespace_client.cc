#include "services/chunk/remote/namespace_client.h"

#include <algorithm>
#include <map>
#include <utility>

#include "services/base/grpc_status.h"
#include "services/base/status.h"
#include "services/chunk/remote/cluster_chunk_store.h"
#include "services/chunk/remote/store_call.h"
#include "spl/v1/kvstore_admin.grpc.pb.h"

namespace spl::chunk {
namespace {

using Stub = v1::KvStoreAdmin::Stub;

v1::NamespaceSettings ToWire(const NamespaceSettings& settings) {
  v1::NamespaceSettings wire;
  wire.set_name(settings.name);
  wire.set_owner(settings.owner);
  wire.set_quota_bytes(settings.quota_bytes);
  wire.set_quota_chunks(settings.quota_chunks);
  wire.set_ttl_seconds(settings.ttl_seconds);
  wire.set_is_public(settings.is_public);
  return wire;
}

NamespaceInfo FromWire(const v1::Namespace& wire) {
  NamespaceInfo info;
  if (wire.id().size() == info.id.size()) std::copy(wire.id().begin(), wire.id().end(), info.id.begin());
  const v1::NamespaceSettings& settings = wire.settings();
  info.settings = {.name = settings.name(),
                   .owner = settings.owner(),
                   .quota_bytes = settings.quota_bytes(),
                   .quota_chunks = settings.quota_chunks(),
                   .ttl_seconds = settings.ttl_seconds(),
                   .is_public = settings.is_public()};
  info.implicit = wire.implicit();
  info.created_ms = wire.created_unix_ms();
  info.chunks = wire.chunks();
  info.bytes = wire.bytes();
  return info;
}

// Merges the same namespace from one more member: use adds up; settings come from a member on which it was created.
void Merge(const v1::Namespace& wire, std::optional<NamespaceInfo>& into) {
  NamespaceInfo info = FromWire(wire);
  if (!into.has_value()) {
    into = std::move(info);
    return;
  }
  info.chunks += into->chunks;
  info.bytes += into->bytes;
  info.created_ms = std::min(info.created_ms, into->created_ms);
  if (info.implicit) {
    info.settings = into->settings;
    info.implicit = into->implicit;
  }
  into = std::move(info);
}

template <typename Request>
Request RequestOf(const Digest& id) {
  Request request;
  request.set_id(id.data(), id.size());
  return request;
}

template <typename Request>
Request RequestOf(const Digest& id, const NamespaceSettings& settings) {
  auto request = RequestOf<Request>(id);
  *request.mutable_settings() = ToWire(settings);
  return request;
}

class GrpcNamespaceClient final : public NamespaceClient {
 public:
  GrpcNamespaceClient(const std::vector<std::string>& addresses, const PeerTls* tls) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
    for (const std::string& address : addresses) {
      members_.push_back({address, v1::KvStoreAdmin::NewStub(MakePeerChannel(address, tls, arguments))});
    }
  }

  absl::StatusOr<NamespaceInfo> Create(const Digest& id, const NamespaceSettings& settings,
                                       Deadline deadline) override {
    absl::Status exists;
    bool created = false;
    for (const Member& member : members_) {
      const absl::Status status =
          CallStore<v1::Namespace>(member, &Stub::CreateNamespace, RequestOf<v1::CreateNamespaceRequest>(id, settings),
                                   deadline)
              .status();
      if (!status.ok() && status.code() != absl::StatusCode::kAlreadyExists) return status;
      exists.Update(status);
      created = created || status.ok();
    }
    if (!created) return exists;
    return Set(id, settings, deadline);
  }

  absl::StatusOr<NamespaceInfo> Stat(const Digest& id, Deadline deadline) override {
    std::optional<NamespaceInfo> found;
    absl::Status missing;
    for (const Member& member : members_) {
      const auto stat =
          CallStore<v1::Namespace>(member, &Stub::StatNamespace, RequestOf<v1::StatNamespaceRequest>(id), deadline);
      if (stat.ok()) {
        Merge(*stat, found);
      } else if (stat.status().code() == absl::StatusCode::kNotFound) {
        missing = stat.status();
      } else {
        return stat.status();
      }
    }
    if (!found.has_value()) return missing;
    return *found;
  }

  absl::StatusOr<NamespaceInfo> Set(const Digest& id, const NamespaceSettings& settings, Deadline deadline) override {
    std::optional<NamespaceInfo> found;
    std::vector<const Member*> without;
    absl::Status missing;
    for (const Member& member : members_) {
      const auto set = CallStore<v1::Namespace>(member, &Stub::SetNamespace,
                                                RequestOf<v1::SetNamespaceRequest>(id, settings), deadline);
      if (set.ok()) {
        Merge(*set, found);
      } else if (set.status().code() == absl::StatusCode::kNotFound) {
        missing = set.status();
        without.push_back(&member);
      } else {
        return set.status();
      }
    }
    if (!found.has_value()) return missing;
    for (const Member* const member : without) {
      const auto made = CallStore<v1::Namespace>(*member, &Stub::CreateNamespace,
                                                 RequestOf<v1::CreateNamespaceRequest>(id, settings), deadline);
      if (!made.ok()) return made.status();
      Merge(*made, found);
    }
    return *found;
  }

  absl::StatusOr<Deleted> Delete(const Digest& id, Deadline deadline) override {
    Deleted deleted;
    absl::Status missing;
    bool found = false;
    for (const Member& member : members_) {
      const auto gone = CallStore<v1::DeleteNamespaceResponse>(member, &Stub::DeleteNamespace,
                                                               RequestOf<v1::DeleteNamespaceRequest>(id), deadline);
      if (gone.ok()) {
        found = true;
        deleted.chunks += gone->chunks();
        deleted.bytes += gone->bytes();
      } else if (gone.status().code() == absl::StatusCode::kNotFound) {
        missing = gone.status();
      } else {
        return gone.status();
      }
    }
    if (!found) return missing;
    return deleted;
  }

  absl::StatusOr<std::vector<NamespaceInfo>> List(const std::string& owner, Deadline deadline) override {
    std::map<std::string, std::optional<NamespaceInfo>> found;
    for (const Member& member : members_) {
      v1::ListNamespacesRequest request;
      request.set_owner(owner);
      SPLICE_ASSIGN_OR_RETURN(
          const auto listed, (CallStore<v1::ListNamespacesResponse>(member, &Stub::ListNamespaces, request, deadline)));
      for (const v1::Namespace& wire : listed.namespaces()) Merge(wire, found[wire.id()]);
    }
    std::vector<NamespaceInfo> infos;
    for (auto& named : found) infos.push_back(*std::move(named.second));
    return infos;
  }

 private:
  using Member = StoreMember<Stub>;

  std::vector<Member> members_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<NamespaceClient>> NamespaceClient::Connect(const std::string& addresses,
                                                                          const PeerTls* tls) {
  SPLICE_ASSIGN_OR_RETURN(const std::vector<std::string> members, ParseMemberList(addresses));
  return std::make_unique<GrpcNamespaceClient>(members, tls);
}

}  // namespace spl::chunk
