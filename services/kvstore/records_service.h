// spl.v1.KvStoreRecords over a RecordTable.
#pragma once

#include <functional>

#include "services/kvstore/record_table.h"
#include "services/kvstore/work_pool.h"
#include "spl/v1/kvstore_records.grpc.pb.h"

namespace spl::kvstore {

// Borrows table and pool, which must outlive the server that runs the service. Every call may wait for the disk and
// runs on the pool.
class RecordsService final : public v1::KvStoreRecords::CallbackService {
 public:
  RecordsService(RecordTable& table, WorkPool& pool) : table_(table), pool_(pool) {}

  grpc::ServerUnaryReactor* GetRecord(grpc::CallbackServerContext* context, const v1::GetRecordRequest* request,
                                      v1::Record* response) override;
  grpc::ServerUnaryReactor* PutRecord(grpc::CallbackServerContext* context, const v1::PutRecordRequest* request,
                                      v1::PutRecordResponse* response) override;
  grpc::ServerUnaryReactor* ListRecords(grpc::CallbackServerContext* context, const v1::ListRecordsRequest* request,
                                        v1::ListRecordsResponse* response) override;
  grpc::ServerUnaryReactor* DeleteRecord(grpc::CallbackServerContext* context, const v1::DeleteRecordRequest* request,
                                         v1::DeleteRecordResponse* response) override;

 private:
  grpc::ServerUnaryReactor* OnPool(grpc::CallbackServerContext* context, std::function<absl::Status()> work);

  RecordTable& table_;
  WorkPool& pool_;
};

}  // namespace spl::kvstore
