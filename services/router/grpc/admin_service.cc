#include "services/router/grpc/admin_service.h"

#include <deque>
#include <mutex>
#include <utility>

#include "services/base/grpc_status.h"
#include "services/base/ids.h"
#include "services/router/request/api_error.h"
#include "services/router/telemetry/audit.h"

namespace spl::router {
namespace {

absl::Status PoolFull() {
  return SetRetryAfterMs(Errorf(absl::StatusCode::kResourceExhausted, "too many calls are waiting"), 1000);
}

v1::KnowledgeBaseVersion ToProto(const KbVersion& v, bool current) {
  v1::KnowledgeBaseVersion out;
  out.set_version(v.version);
  out.set_state(KbStateName(v.state));
  out.set_created_unix_ms(v.created_ms);
  out.set_model_fingerprint(HexDecode(v.model_fingerprint).value_or(""));
  out.set_documents(v.documents);
  out.set_tokens(v.tokens);
  out.set_contexts(v.contexts);
  out.set_chunks(v.chunks);
  out.set_bytes(v.bytes);
  out.set_prefill_seconds(v.prefill_seconds);
  out.set_error(v.error);
  out.set_current(current);
  return out;
}

void ToProto(const KbHead& head, v1::KnowledgeBase* out) {
  out->set_name(head.name);
  out->set_current(head.current);
  for (const KbVersion& v : head.versions) *out->add_versions() = ToProto(v, v.version == head.current);
}

void ToProto(const KbView& view, v1::KnowledgeBase* out) {
  ToProto(view.head, out);
  out->set_shown_version(view.shown_version);
  if (view.content == nullptr) return;
  out->set_instruction(view.content->instruction);
  for (const KbDocument& d : view.content->documents) {
    v1::KnowledgeBaseDocumentInfo& info = *out->add_documents();
    info.set_id(d.id);
    info.set_sha256(d.sha256);
    info.set_text_bytes(d.text.size());
    info.set_tokens(d.tokens);
    info.set_context(d.context);
  }
}

void ToProto(const CallerNamespace& ns, v1::TenantNamespace* out) {
  out->set_name(ns.name);
  out->set_quota_bytes(ns.quota_bytes);
  out->set_quota_chunks(ns.quota_chunks);
  out->set_ttl_seconds(ns.ttl_seconds);
  out->set_is_public(ns.is_public);
  out->set_chunks(ns.chunks);
  out->set_bytes(ns.bytes);
  out->set_created_unix_ms(ns.created_ms);
  out->set_implicit(ns.implicit);
}

PublishInput FromProto(const v1::PublishKnowledgeBaseRequest& request) {
  PublishInput input{.name = request.name(), .instruction = request.instruction()};
  for (const v1::KnowledgeBaseDocument& d : request.documents()) input.documents.push_back({d.id(), d.text()});
  input.swap = !request.has_swap() || request.swap();
  input.durable = !request.has_durable() || request.durable();
  input.together = request.together();
  return input;
}

// Progress is written as it comes; the last message and the status when the publish has ended. Owns itself until gRPC
// is done with it and the publish has ended.
class PublishReactor final : public grpc::ServerWriteReactor<v1::PublishKnowledgeBaseResponse> {
 public:
  static std::shared_ptr<PublishReactor> Create() {
    auto reactor = std::shared_ptr<PublishReactor>(new PublishReactor);
    reactor->self_ = reactor;
    return reactor;
  }

  PublishControl& control() { return control_; }

  void End(const absl::StatusOr<KbVersion>& version, bool current) {
    std::lock_guard lock(mutex_);
    ended_ = true;
    status_ = version.status();
    if (version.ok()) {
      v1::PublishKnowledgeBaseResponse response;
      *response.mutable_version() = ToProto(*version, current);
      pending_.push_back(std::move(response));
    }
    AdvanceLocked();
  }

 private:
  void OnProgress(const PublishProgress& p) {
    v1::PublishKnowledgeBaseResponse response;
    v1::PublishKnowledgeBaseResponse::Progress& progress = *response.mutable_progress();
    progress.set_contexts_done(p.contexts_done);
    progress.set_contexts(p.contexts);
    progress.set_tokens_done(p.tokens_done);
    progress.set_tokens(p.tokens);
    std::lock_guard lock(mutex_);
    // Messages that a slow reader has not got yet are out of date.
    while (pending_.size() > 1) pending_.pop_back();
    pending_.push_back(std::move(response));
    AdvanceLocked();
  }

  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    writing_ = false;
    pending_.pop_front();
    if (!ok) pending_.clear();
    AdvanceLocked();
  }
  void OnCancel() override { control_.Cancel(absl::CancelledError("the client left")); }
  void OnDone() override { const std::shared_ptr<PublishReactor> self = std::move(self_); }

  void AdvanceLocked() {
    if (writing_ || finished_) return;
    if (!pending_.empty()) {
      writing_ = true;
      StartWrite(&pending_.front());
    } else if (ended_) {
      finished_ = true;
      Finish(ToGrpcStatus(status_));
    }
  }

  PublishControl control_{[this](const PublishProgress& progress) { OnProgress(progress); }};
  std::shared_ptr<PublishReactor> self_;
  std::mutex mutex_;                                      // guards all below
  std::deque<v1::PublishKnowledgeBaseResponse> pending_;  // the front one is being written when writing_
  bool writing_ = false;
  bool ended_ = false;
  bool finished_ = false;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<Caller> AdminService::Authenticate(const grpc::CallbackServerContext& context) const {
  const auto& metadata = context.client_metadata();
  const auto it = metadata.find("authorization");
  SPLICE_ASSIGN_OR_RETURN(
      Caller caller, keys_.Authenticate(it == metadata.end() ? std::string_view()
                                                             : std::string_view(it->second.data(), it->second.size())));
  SPLICE_RETURN_IF_ERROR(CheckAdmin(keys_, caller, loopback_));
  return caller;
}

void AdminService::Audited::Write(std::string_view caller, const absl::Status& result) const {
  if (*call == 0) return;
  WriteAudit({.caller = caller, .api = "grpc", .call = call, .target = target, .result = result});
}

grpc::ServerUnaryReactor* AdminService::OnPool(grpc::CallbackServerContext* context, const Audited& audited,
                                               std::function<absl::Status(const Caller&)> work) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  const absl::StatusOr<Caller> caller = Authenticate(*context);
  if (!caller.ok()) {
    audited.Write("", caller.status());
    reactor->Finish(ToGrpcStatus(caller.status()));
    return reactor;
  }
  const bool posted = calls_.TryPost([work = std::move(work), reactor, caller = *caller, audited] {
    const absl::Status status = work(caller);
    audited.Write(caller.name, status);
    reactor->Finish(ToGrpcStatus(status));
  });
  if (!posted) {
    audited.Write(caller->name, PoolFull());
    reactor->Finish(ToGrpcStatus(PoolFull()));
  }
  return reactor;
}

grpc::ServerWriteReactor<v1::PublishKnowledgeBaseResponse>* AdminService::PublishKnowledgeBase(
    grpc::CallbackServerContext* context, const v1::PublishKnowledgeBaseRequest* request) {
  const std::shared_ptr<PublishReactor> reactor = PublishReactor::Create();
  const Audited audited{"PublishKnowledgeBase", request->name()};
  const absl::StatusOr<Caller> caller = Authenticate(*context);
  if (!caller.ok()) {
    audited.Write("", caller.status());
    reactor->End(caller.status(), false);
    return reactor.get();
  }
  // `request` lives until the call is done, which is not before the reactor finishes.
  const bool posted = publishes_.TryPost([this, reactor, request, audited, caller = *caller] {
    const PublishInput input = FromProto(*request);
    const absl::StatusOr<KbVersion> version = bases_.Publish(caller, input, reactor->control());
    audited.Write(caller.name, version.status());
    reactor->End(version, input.swap);
  });
  if (!posted) {
    audited.Write(caller->name, PoolFull());
    reactor->End(PoolFull(), false);
  }
  return reactor.get();
}

grpc::ServerUnaryReactor* AdminService::ListKnowledgeBases(grpc::CallbackServerContext* context,
                                                           const v1::ListKnowledgeBasesRequest*,
                                                           v1::ListKnowledgeBasesResponse* response) {
  return OnPool(context, {}, [=, this](const Caller& caller) -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(const auto heads, bases_.List(caller));
    for (const KbHead& head : heads) ToProto(head, response->add_knowledge_bases());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::GetKnowledgeBase(grpc::CallbackServerContext* context,
                                                         const v1::GetKnowledgeBaseRequest* request,
                                                         v1::KnowledgeBase* response) {
  return OnPool(context, {}, [=, this](const Caller& caller) -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(const KbView view, bases_.Get(caller, request->name(), request->version()));
    ToProto(view, response);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::DiffKnowledgeBase(grpc::CallbackServerContext* context,
                                                          const v1::DiffKnowledgeBaseRequest* request,
                                                          v1::DiffKnowledgeBaseResponse* response) {
  return OnPool(context, {}, [=, this](const Caller& caller) -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(const auto result, bases_.Diff(caller, request->name(), request->from(), request->to()));
    response->set_from(result.from);
    response->set_to(result.to);
    response->mutable_added()->Add(result.diff.added.begin(), result.diff.added.end());
    response->mutable_removed()->Add(result.diff.removed.begin(), result.diff.removed.end());
    response->mutable_changed()->Add(result.diff.changed.begin(), result.diff.changed.end());
    response->set_unchanged(result.diff.unchanged);
    response->set_instruction_changed(result.diff.instruction_changed);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::SwapKnowledgeBase(grpc::CallbackServerContext* context,
                                                          const v1::SwapKnowledgeBaseRequest* request,
                                                          v1::KnowledgeBase* response) {
  return OnPool(context, {"SwapKnowledgeBase", request->name()}, [=, this](const Caller& caller) -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(const KbHead head, bases_.Swap(caller, request->name(), request->version()));
    ToProto(head, response);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::RollbackKnowledgeBase(grpc::CallbackServerContext* context,
                                                              const v1::RollbackKnowledgeBaseRequest* request,
                                                              v1::KnowledgeBase* response) {
  return OnPool(context, {"RollbackKnowledgeBase", request->name()}, [=, this](const Caller& caller) -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(const KbHead head, bases_.Rollback(caller, request->name()));
    ToProto(head, response);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::DeleteKnowledgeBase(grpc::CallbackServerContext* context,
                                                            const v1::DeleteKnowledgeBaseRequest* request,
                                                            v1::DeleteKnowledgeBaseResponse* response) {
  return OnPool(context, {"DeleteKnowledgeBase", request->name()}, [=, this](const Caller& caller) -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(const auto gone, bases_.Delete(caller, request->name(), request->version()));
    response->set_versions(gone.versions);
    response->set_chunks(gone.chunks);
    response->set_bytes(gone.bytes);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::ListNamespaces(grpc::CallbackServerContext* context,
                                                       const v1::ListTenantNamespacesRequest*,
                                                       v1::ListTenantNamespacesResponse* response) {
  return OnPool(context, {}, [=, this](const Caller& caller) -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(const auto namespaces, bases_.ListNamespaces(caller));
    for (const CallerNamespace& ns : namespaces) ToProto(ns, response->add_namespaces());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::CreateNamespace(grpc::CallbackServerContext* context,
                                                        const v1::CreateTenantNamespaceRequest* request,
                                                        v1::TenantNamespace* response) {
  return OnPool(context, {"CreateNamespace", request->name()}, [=, this](const Caller& caller) -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(const CallerNamespace made,
                            bases_.CreateNamespace(caller, {.name = request->name(),
                                                            .quota_bytes = request->quota_bytes(),
                                                            .quota_chunks = request->quota_chunks(),
                                                            .ttl_seconds = request->ttl_seconds(),
                                                            .is_public = request->is_public()}));
    ToProto(made, response);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::GetNamespace(grpc::CallbackServerContext* context,
                                                     const v1::GetTenantNamespaceRequest* request,
                                                     v1::TenantNamespace* response) {
  return OnPool(context, {}, [=, this](const Caller& caller) -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(const CallerNamespace ns, bases_.GetNamespace(caller, request->name()));
    ToProto(ns, response);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::UpdateNamespace(grpc::CallbackServerContext* context,
                                                        const v1::UpdateTenantNamespaceRequest* request,
                                                        v1::TenantNamespace* response) {
  return OnPool(context, {"UpdateNamespace", request->name()}, [=, this](const Caller& caller) -> absl::Status {
    CallerNamespaceChange change;
    if (request->has_quota_bytes()) change.quota_bytes = request->quota_bytes();
    if (request->has_quota_chunks()) change.quota_chunks = request->quota_chunks();
    if (request->has_ttl_seconds()) change.ttl_seconds = request->ttl_seconds();
    if (request->has_is_public()) change.is_public = request->is_public();
    SPLICE_ASSIGN_OR_RETURN(const CallerNamespace ns, bases_.UpdateNamespace(caller, request->name(), change));
    ToProto(ns, response);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::DeleteNamespace(grpc::CallbackServerContext* context,
                                                        const v1::DeleteTenantNamespaceRequest* request,
                                                        v1::DeleteTenantNamespaceResponse* response) {
  return OnPool(context, {"DeleteNamespace", request->name()}, [=, this](const Caller& caller) -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(const auto gone, bases_.DeleteNamespace(caller, request->name()));
    response->set_chunks(gone.chunks);
    response->set_bytes(gone.bytes);
    return absl::OkStatus();
  });
}

}  // namespace spl::router
