#include "services/chunk/remote/record_client.h"

#include <algorithm>
#include <map>
#include <utility>

#include "services/base/grpc_status.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "services/chunk/remote/cluster_chunk_store.h"
#include "services/chunk/remote/store_call.h"
#include "services/chunk/rendezvous.h"
#include "spl/v1/kvstore_records.grpc.pb.h"

namespace spl::chunk {
namespace {

using Stub = v1::KvStoreRecords::Stub;

constexpr int kMaxMessageBytes = 20 << 20;  // a record of 16 MiB and its envelope

// Half of the time that is left: the other half is the second choice's.
RecordClient::Deadline HalfWay(RecordClient::Deadline deadline) {
  const auto now = std::chrono::steady_clock::now();
  return now + std::max(deadline - now, std::chrono::steady_clock::duration::zero()) / 2;
}

StoredRecord FromWire(v1::Record&& wire) {
  return {.name = std::move(*wire.mutable_name()),
          .revision = wire.revision(),
          .modified_ms = wire.modified_unix_ms(),
          .value = std::move(*wire.mutable_value()),
          .value_bytes = wire.value_bytes()};
}

template <typename Request>
Request RequestOf(const Digest& owner, const std::string& name) {
  Request request;
  request.set_owner(owner.data(), owner.size());
  request.set_name(name);
  return request;
}

class GrpcRecordClient final : public RecordClient {
 public:
  GrpcRecordClient(const std::vector<std::string>& addresses, const PeerTls* tls) : rendezvous_(addresses) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
    arguments.SetMaxSendMessageSize(kMaxMessageBytes);
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
    for (const std::string& address : addresses) {
      members_.push_back({address, v1::KvStoreRecords::NewStub(MakePeerChannel(address, tls, arguments))});
    }
  }

  absl::StatusOr<StoredRecord> Get(const Digest& owner, const std::string& name, Deadline deadline) override {
    const Choices at = ChoicesOf(owner);
    absl::StatusOr<StoredRecord> first = GetFrom(*at.first, owner, name, at.second ? HalfWay(deadline) : deadline);
    const bool missing = first.status().code() == absl::StatusCode::kNotFound;
    if (first.ok() || at.second == nullptr || !(missing || IsLoss(first.status()))) return first;
    absl::StatusOr<StoredRecord> second = GetFrom(*at.second, owner, name, deadline);
    if (!second.ok()) return first;  // the first member's answer, or its failure to answer
    if (missing) {
      const absl::Status moved = PutCopy(*at.first, owner, *second, deadline);
      if (!moved.ok()) log::Warning("records.not_moved", log::F("node", at.first->address), log::F("cause", moved));
    }
    return second;
  }

  absl::StatusOr<uint64_t> Put(const Digest& owner, const std::string& name, const std::string& value,
                               const PutOptions& options, Deadline deadline) override {
    const Choices at = ChoicesOf(owner);
    auto request = RequestOf<v1::PutRecordRequest>(owner, name);
    request.set_value(value);
    if (options.expected_revision.has_value()) request.set_expected_revision(*options.expected_revision);
    request.set_durable(options.durable);
    SPLICE_ASSIGN_OR_RETURN(const v1::PutRecordResponse response,
                            (CallStore<v1::PutRecordResponse>(*at.first, &Stub::PutRecord, request, deadline)));
    if (at.second == nullptr) return response.revision();
    const absl::Status copied =
        PutCopy(*at.second, owner, {.name = name, .revision = response.revision(), .value = value}, deadline);
    if (!copied.ok()) log::Warning("records.not_copied", log::F("node", at.second->address), log::F("cause", copied));
    return response.revision();
  }

  absl::Status Delete(const Digest& owner, const std::string& name, std::optional<uint64_t> expected_revision,
                      Deadline deadline) override {
    const Choices at = ChoicesOf(owner);
    auto request = RequestOf<v1::DeleteRecordRequest>(owner, name);
    if (at.second != nullptr) {
      const absl::Status copy =
          CallStore<v1::DeleteRecordResponse>(*at.second, &Stub::DeleteRecord, request, deadline).status();
      if (!copy.ok() && copy.code() != absl::StatusCode::kNotFound) return copy;
    }
    if (expected_revision.has_value()) request.set_expected_revision(*expected_revision);
    return CallStore<v1::DeleteRecordResponse>(*at.first, &Stub::DeleteRecord, request, deadline).status();
  }

  absl::StatusOr<std::vector<StoredRecord>> List(const Digest& owner, const std::string& prefix,
                                                 Deadline deadline) override {
    const Choices at = ChoicesOf(owner);
    std::map<std::string, StoredRecord> found;
    const absl::Status first = ListFrom(*at.first, owner, prefix, at.second ? HalfWay(deadline) : deadline, found);
    if (!first.ok() && (at.second == nullptr || !IsLoss(first))) return first;
    if (at.second != nullptr) {
      const absl::Status second = ListFrom(*at.second, owner, prefix, deadline, found);
      if (!second.ok() && (!first.ok() || !IsLoss(second))) return first.ok() ? second : first;
    }
    std::vector<StoredRecord> records;
    for (auto& named : found) records.push_back(std::move(named.second));
    return records;
  }

 private:
  using Member = StoreMember<Stub>;
  struct Choices {
    const Member* first;
    const Member* second;  // null: there is only one store
  };

  // Ranks by the owner, not by the record: all records of an owner are available or unavailable together, and listed in
  // one place.
  Choices ChoicesOf(const Digest& owner) const {
    const std::vector<size_t> ranking = rendezvous_.Rank(ChunkKey{owner});
    return {&members_[ranking[0]], ranking.size() > 1 ? &members_[ranking[1]] : nullptr};
  }

  static absl::StatusOr<StoredRecord> GetFrom(const Member& member, const Digest& owner, const std::string& name,
                                              Deadline deadline) {
    SPLICE_ASSIGN_OR_RETURN(
        v1::Record record,
        (CallStore<v1::Record>(member, &Stub::GetRecord, RequestOf<v1::GetRecordRequest>(owner, name), deadline)));
    return FromWire(std::move(record));
  }

  static absl::Status PutCopy(const Member& member, const Digest& owner, const StoredRecord& record,
                              Deadline deadline) {
    auto request = RequestOf<v1::PutRecordRequest>(owner, record.name);
    request.set_value(record.value);
    request.set_copy_of_revision(record.revision);
    return CallStore<v1::PutRecordResponse>(member, &Stub::PutRecord, request, deadline).status();
  }

  static absl::Status ListFrom(const Member& member, const Digest& owner, const std::string& prefix, Deadline deadline,
                               std::map<std::string, StoredRecord>& found) {
    v1::ListRecordsRequest request;
    request.set_owner(owner.data(), owner.size());
    request.set_prefix(prefix);
    for (bool more = true; more;) {
      SPLICE_ASSIGN_OR_RETURN(v1::ListRecordsResponse response,
                              (CallStore<v1::ListRecordsResponse>(member, &Stub::ListRecords, request, deadline)));
      for (v1::Record& record : *response.mutable_records()) {
        request.set_after(record.name());
        StoredRecord& known = found[record.name()];
        if (known.revision < record.revision()) known = FromWire(std::move(record));
      }
      more = response.more() && !response.records().empty();
    }
    return absl::OkStatus();
  }

  const Rendezvous rendezvous_;
  std::vector<Member> members_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<RecordClient>> RecordClient::Connect(const std::string& addresses, const PeerTls* tls) {
  SPLICE_ASSIGN_OR_RETURN(const std::vector<std::string> members, ParseMemberList(addresses));
  return std::make_unique<GrpcRecordClient>(members, tls);
}

}  // namespace spl::chunk
