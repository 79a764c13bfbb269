// spl.v1.Admin: the admin API over gRPC.
#pragma once

#include <functional>

#include "services/router/admission/auth.h"
#include "services/router/admission/work_pool.h"
#include "services/router/kb/knowledge_bases.h"
#include "spl/v1/admin.grpc.pb.h"

namespace spl::router {

// gRPC's threads only authenticate and enqueue; see AdminApi for the pools. Borrows all arguments.
class AdminService final : public v1::Admin::CallbackService {
 public:
  // `loopback`: the server listens on this machine only (CheckAdmin).
  AdminService(KnowledgeBases& bases, const ApiKeys& keys, bool loopback, WorkPool& calls, WorkPool& publishes)
      : bases_(bases), keys_(keys), loopback_(loopback), calls_(calls), publishes_(publishes) {}

  grpc::ServerWriteReactor<v1::PublishKnowledgeBaseResponse>* PublishKnowledgeBase(
      grpc::CallbackServerContext* context, const v1::PublishKnowledgeBaseRequest* request) override;
  grpc::ServerUnaryReactor* ListKnowledgeBases(grpc::CallbackServerContext* context,
                                               const v1::ListKnowledgeBasesRequest* request,
                                               v1::ListKnowledgeBasesResponse* response) override;
  grpc::ServerUnaryReactor* GetKnowledgeBase(grpc::CallbackServerContext* context,
                                             const v1::GetKnowledgeBaseRequest* request,
                                             v1::KnowledgeBase* response) override;
  grpc::ServerUnaryReactor* DiffKnowledgeBase(grpc::CallbackServerContext* context,
                                              const v1::DiffKnowledgeBaseRequest* request,
                                              v1::DiffKnowledgeBaseResponse* response) override;
  grpc::ServerUnaryReactor* SwapKnowledgeBase(grpc::CallbackServerContext* context,
                                              const v1::SwapKnowledgeBaseRequest* request,
                                              v1::KnowledgeBase* response) override;
  grpc::ServerUnaryReactor* RollbackKnowledgeBase(grpc::CallbackServerContext* context,
                                                  const v1::RollbackKnowledgeBaseRequest* request,
                                                  v1::KnowledgeBase* response) override;
  grpc::ServerUnaryReactor* DeleteKnowledgeBase(grpc::CallbackServerContext* context,
                                                const v1::DeleteKnowledgeBaseRequest* request,
                                                v1::DeleteKnowledgeBaseResponse* response) override;
  grpc::ServerUnaryReactor* ListNamespaces(grpc::CallbackServerContext* context,
                                           const v1::ListTenantNamespacesRequest* request,
                                           v1::ListTenantNamespacesResponse* response) override;
  grpc::ServerUnaryReactor* CreateNamespace(grpc::CallbackServerContext* context,
                                            const v1::CreateTenantNamespaceRequest* request,
                                            v1::TenantNamespace* response) override;
  grpc::ServerUnaryReactor* GetNamespace(grpc::CallbackServerContext* context,
                                         const v1::GetTenantNamespaceRequest* request,
                                         v1::TenantNamespace* response) override;
  grpc::ServerUnaryReactor* UpdateNamespace(grpc::CallbackServerContext* context,
                                            const v1::UpdateTenantNamespaceRequest* request,
                                            v1::TenantNamespace* response) override;
  grpc::ServerUnaryReactor* DeleteNamespace(grpc::CallbackServerContext* context,
                                            const v1::DeleteTenantNamespaceRequest* request,
                                            v1::DeleteTenantNamespaceResponse* response) override;

 private:
  // Description of a call for the audit log. A call without a name changes nothing and is not logged.
  struct Audited {
    const char* call = "";
    std::string target = {};
    void Write(std::string_view caller, const absl::Status& result) const;
  };
  // Authenticates, then runs `work` on the pool.
  grpc::ServerUnaryReactor* OnPool(grpc::CallbackServerContext* context, const Audited& audited,
                                   std::function<absl::Status(const Caller&)> work);
  absl::StatusOr<Caller> Authenticate(const grpc::CallbackServerContext& context) const;

  KnowledgeBases& bases_;
  const ApiKeys& keys_;
  const bool loopback_;
  WorkPool& calls_;
  WorkPool& publishes_;
};

}  // namespace spl::router
