// spl.v1.KvStoreAdmin over a TieredStore.
#pragma once

#include "services/kvstore/tiered_store.h"
#include "services/kvstore/work_pool.h"
#include "spl/v1/kvstore_admin.grpc.pb.h"

namespace spl::kvstore {

// Borrows store and pool, which must outlive the server that runs the service. Every call may write to the disk and
// runs on the pool.
class AdminService final : public v1::KvStoreAdmin::CallbackService {
 public:
  AdminService(TieredStore& store, WorkPool& pool) : store_(store), pool_(pool) {}

  grpc::ServerUnaryReactor* CreateNamespace(grpc::CallbackServerContext* context,
                                            const v1::CreateNamespaceRequest* request,
                                            v1::Namespace* response) override;
  grpc::ServerUnaryReactor* ListNamespaces(grpc::CallbackServerContext* context,
                                           const v1::ListNamespacesRequest* request,
                                           v1::ListNamespacesResponse* response) override;
  grpc::ServerUnaryReactor* StatNamespace(grpc::CallbackServerContext* context, const v1::StatNamespaceRequest* request,
                                          v1::Namespace* response) override;
  grpc::ServerUnaryReactor* SetNamespace(grpc::CallbackServerContext* context, const v1::SetNamespaceRequest* request,
                                         v1::Namespace* response) override;
  grpc::ServerUnaryReactor* DeleteNamespace(grpc::CallbackServerContext* context,
                                            const v1::DeleteNamespaceRequest* request,
                                            v1::DeleteNamespaceResponse* response) override;
  grpc::ServerUnaryReactor* SetPin(grpc::CallbackServerContext* context, const v1::SetPinRequest* request,
                                   v1::SetPinResponse* response) override;

 private:
  grpc::ServerUnaryReactor* OnPool(grpc::CallbackServerContext* context, std::function<absl::Status()> work);

  TieredStore& store_;
  WorkPool& pool_;
};

}  // namespace spl::kvstore
