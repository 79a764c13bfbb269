// spl.v1.KvStoreRma: the control half of moving chunks by remote memory access (RMA).
#pragma once

#include "services/base/trace.h"
#include "services/kvstore/lease_table.h"
#include "services/kvstore/put_table.h"
#include "services/kvstore/tiered_store.h"
#include "services/kvstore/work_pool.h"
#include "services/transport/kv_transport.h"
#include "spl/v1/kvstore.grpc.pb.h"

namespace spl::kvstore {

// Borrows all arguments, which must outlive the server that runs the service. Work that may wait for the disk or
// checksums payloads runs on the pool. Unimplemented: every call, if there is no transport.
class RmaService final : public v1::KvStoreRma::CallbackService {
 public:
  RmaService(TieredStore& store, LeaseTable& leases, PutTable& puts, WorkPool& pool,
             const transport::KvTransport* transport, const Tracer& tracer)
      : store_(store), leases_(leases), puts_(puts), pool_(pool), transport_(transport), tracer_(tracer) {}

  grpc::ServerUnaryReactor* GetDataEndpoint(grpc::CallbackServerContext* context,
                                            const v1::GetDataEndpointRequest* request,
                                            v1::DataEndpoint* response) override;
  grpc::ServerUnaryReactor* Lease(grpc::CallbackServerContext* context, const v1::LeaseRequest* request,
                                  v1::LeaseResponse* response) override;
  grpc::ServerUnaryReactor* RenewLease(grpc::CallbackServerContext* context, const v1::RenewLeaseRequest* request,
                                       v1::RenewLeaseResponse* response) override;
  grpc::ServerUnaryReactor* ReleaseLease(grpc::CallbackServerContext* context, const v1::ReleaseLeaseRequest* request,
                                         v1::ReleaseLeaseResponse* response) override;
  grpc::ServerUnaryReactor* ReservePut(grpc::CallbackServerContext* context, const v1::ReservePutRequest* request,
                                       v1::ReservePutResponse* response) override;
  grpc::ServerUnaryReactor* CommitPut(grpc::CallbackServerContext* context, const v1::CommitPutRequest* request,
                                      v1::PutChunksResponse* response) override;
  grpc::ServerUnaryReactor* AbortPut(grpc::CallbackServerContext* context, const v1::AbortPutRequest* request,
                                     v1::AbortPutResponse* response) override;

 private:
  absl::Status CheckTransport() const;
  // Runs `work` on the pool and finishes the call with the status of `work`.
  grpc::ServerUnaryReactor* OnPool(grpc::CallbackServerContext* context, std::function<absl::Status()> work);
  absl::Status DoLease(const v1::LeaseRequest& request, v1::LeaseResponse& response);
  absl::Status DoReserve(const v1::ReservePutRequest& request, v1::ReservePutResponse& response);
  void DoCommit(const v1::CommitPutRequest& request, v1::PutChunksResponse& response,
                grpc::ServerUnaryReactor* reactor);

  TieredStore& store_;
  LeaseTable& leases_;
  PutTable& puts_;
  WorkPool& pool_;
  const transport::KvTransport* const transport_;
  const Tracer& tracer_;
  const std::string instance_id_ = RandomId::Make().ToBytes();
};

}  // namespace spl::kvstore
