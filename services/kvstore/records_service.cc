#include "services/kvstore/records_service.h"

#include <algorithm>
#include <utility>

#include "services/base/grpc_status.h"
#include "services/base/status.h"

namespace spl::kvstore {
namespace {

absl::StatusOr<chunk::Digest> OwnerFromWire(const std::string& bytes) {
  chunk::Digest owner;
  if (bytes.size() != owner.size()) return InvalidArgument("owner has {} bytes, not {}", bytes.size(), owner.size());
  std::copy(bytes.begin(), bytes.end(), owner.begin());
  return owner;
}

void ToWire(Record&& record, v1::Record& wire) {
  wire.set_name(std::move(record.name));
  wire.set_revision(record.revision);
  wire.set_modified_unix_ms(record.modified_ms);
  wire.set_value(std::move(record.value));
  wire.set_value_bytes(record.value_bytes);
}

template <typename Request>
std::optional<uint64_t> Expected(const Request& request) {
  return request.has_expected_revision() ? std::optional(request.expected_revision()) : std::nullopt;
}

}  // namespace

grpc::ServerUnaryReactor* RecordsService::OnPool(grpc::CallbackServerContext* context,
                                                 std::function<absl::Status()> work) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  if (!pool_.Submit([work = std::move(work), reactor] { reactor->Finish(ToGrpcStatus(work())); })) {
    reactor->Finish(ToGrpcStatus(Errorf(absl::StatusCode::kResourceExhausted, "too many calls are waiting")));
  }
  return reactor;
}

grpc::ServerUnaryReactor* RecordsService::GetRecord(grpc::CallbackServerContext* context,
                                                    const v1::GetRecordRequest* request, v1::Record* response) {
  return OnPool(context, [=, this]() -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(const chunk::Digest owner, OwnerFromWire(request->owner()));
    SPLICE_ASSIGN_OR_RETURN(Record record, table_.Get(owner, request->name()));
    ToWire(std::move(record), *response);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* RecordsService::PutRecord(grpc::CallbackServerContext* context,
                                                    const v1::PutRecordRequest* request,
                                                    v1::PutRecordResponse* response) {
  return OnPool(context, [=, this]() -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(const chunk::Digest owner, OwnerFromWire(request->owner()));
    if (request->durable() && !table_.durable()) {
      return Errorf(absl::StatusCode::kFailedPrecondition,
                    "the store has no disk (--data-dir), so that record '{}' would be lost with its process",
                    request->name());
    }
    RecordTable::PutOptions options{.expected_revision = Expected(*request), .copy_of_revision = {}};
    if (request->has_copy_of_revision()) options.copy_of_revision = request->copy_of_revision();
    SPLICE_ASSIGN_OR_RETURN(const uint64_t revision, table_.Put(owner, request->name(), request->value(), options));
    response->set_revision(revision);
    response->set_durable(table_.durable());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* RecordsService::ListRecords(grpc::CallbackServerContext* context,
                                                      const v1::ListRecordsRequest* request,
                                                      v1::ListRecordsResponse* response) {
  return OnPool(context, [=, this]() -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(const chunk::Digest owner, OwnerFromWire(request->owner()));
    SPLICE_ASSIGN_OR_RETURN(RecordTable::Listed listed,
                            table_.List(owner, request->prefix(), request->after(), request->max_records()));
    for (Record& record : listed.records) ToWire(std::move(record), *response->add_records());
    response->set_more(listed.more);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* RecordsService::DeleteRecord(grpc::CallbackServerContext* context,
                                                       const v1::DeleteRecordRequest* request,
                                                       v1::DeleteRecordResponse*) {
  return OnPool(context, [=, this]() -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(const chunk::Digest owner, OwnerFromWire(request->owner()));
    return table_.Delete(owner, request->name(), Expected(*request));
  });
}

}  // namespace spl::kvstore
