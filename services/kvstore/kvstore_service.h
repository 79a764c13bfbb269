// spl.v1.KvStore over a TieredStore.
#pragma once

#include "services/base/trace.h"
#include "services/kvstore/lease_table.h"
#include "services/kvstore/put_table.h"
#include "services/kvstore/tiered_store.h"
#include "services/kvstore/work_pool.h"
#include "spl/v1/kvstore.grpc.pb.h"

namespace spl::kvstore {

// Borrows all arguments, which must outlive the server that runs the service. gRPC threads parse and checksum; reads,
// which may wait for the disk, run on the pool.
class KvStoreService final : public v1::KvStore::CallbackService {
 public:
  KvStoreService(TieredStore& store, const LeaseTable& leases, const PutTable& puts, WorkPool& pool,
                 const Tracer& tracer)
      : store_(store), leases_(leases), puts_(puts), pool_(pool), tracer_(tracer) {}

  grpc::ServerUnaryReactor* Contains(grpc::CallbackServerContext* context, const v1::ContainsRequest* request,
                                     v1::ContainsResponse* response) override;
  grpc::ServerWriteReactor<v1::ChunkPart>* Get(grpc::CallbackServerContext* context,
                                               const v1::GetChunksRequest* request) override;
  grpc::ServerReadReactor<v1::ChunkPart>* Put(grpc::CallbackServerContext* context,
                                              v1::PutChunksResponse* response) override;
  grpc::ServerUnaryReactor* GetStats(grpc::CallbackServerContext* context, const v1::GetStoreStatsRequest* request,
                                     v1::StoreStats* response) override;

 private:
  TieredStore& store_;
  const LeaseTable& leases_;  // for GetStats
  const PutTable& puts_;
  WorkPool& pool_;
  const Tracer& tracer_;
};

}  // namespace spl::kvstore
