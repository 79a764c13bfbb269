#include "services/kvstore/record_table.h"

#include <algorithm>
#include <utility>

#include "services/base/fault_point.h"
#include "services/base/status.h"

namespace spl::kvstore {
namespace {

FaultPoint saved_fault("kvstore.record.saved");  // on disk, no caller has been told

constexpr char kRowVersion = 1;
constexpr size_t kRowHeaderBytes = 1 + 8 + 8;  // version, revision, modified_ms; the value is the rest

void AppendU64(std::string& out, uint64_t value) {
  for (int i = 0; i < 8; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}

uint64_t ReadU64(std::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < 8; ++i) value |= static_cast<uint64_t>(static_cast<uint8_t>(bytes[i])) << (8 * i);
  return value;
}

std::string Encode(uint64_t revision, uint64_t modified_ms, const std::string& value) {
  std::string row(1, kRowVersion);
  row.reserve(kRowHeaderBytes + value.size());
  AppendU64(row, revision);
  AppendU64(row, modified_ms);
  return row + value;
}

absl::StatusOr<Record> Decode(std::string_view name, std::string_view row, bool with_value) {
  if (row.size() < kRowHeaderBytes || row[0] != kRowVersion) {
    return Errorf(absl::StatusCode::kDataLoss, "record '{}' is of another format", name);
  }
  Record record{.name = std::string(name),
                .revision = ReadU64(row.substr(1)),
                .modified_ms = ReadU64(row.substr(9)),
                .value = {},
                .value_bytes = row.size() - kRowHeaderBytes};
  if (with_value) record.value = row.substr(kRowHeaderBytes);
  return record;
}

absl::Status CheckName(const std::string& name) {
  if (!name.empty() && name.size() <= kMaxRecordNameBytes) return absl::OkStatus();
  return InvalidArgument("name has {} bytes, not 1 to {}", name.size(), kMaxRecordNameBytes);
}

std::string KeyOf(const chunk::Digest& owner, const std::string& name) {
  return std::string(reinterpret_cast<const char*>(owner.data()), owner.size()) + name;
}

class MemoryRecordStorage final : public RecordStorage {
 public:
  explicit MemoryRecordStorage(uint64_t capacity_bytes) : capacity_bytes_(capacity_bytes) {}

  absl::Status SaveRecord(const std::string& key, const std::string& row, uint64_t last_revision) override {
    std::lock_guard lock(mutex_);
    const auto found = rows_.find(key);
    const uint64_t before = found == rows_.end() ? 0 : key.size() + found->second.size();
    const uint64_t after = used_bytes_ - before + key.size() + row.size();
    if (after > capacity_bytes_) {
      return Errorf(absl::StatusCode::kResourceExhausted,
                    "records may take {} bytes of a store without a disk; delete some or give it --data-dir",
                    capacity_bytes_);
    }
    rows_[key] = row;
    used_bytes_ = after;
    last_revision_ = last_revision;
    return absl::OkStatus();
  }
  absl::Status EraseRecord(const std::string& key) override {
    std::lock_guard lock(mutex_);
    const auto found = rows_.find(key);
    if (found == rows_.end()) return absl::OkStatus();
    used_bytes_ -= key.size() + found->second.size();
    rows_.erase(found);
    return absl::OkStatus();
  }
  absl::StatusOr<std::optional<std::string>> ReadRecord(const std::string& key) const override {
    std::lock_guard lock(mutex_);
    const auto found = rows_.find(key);
    return found == rows_.end() ? std::nullopt : std::optional(found->second);
  }
  absl::StatusOr<uint64_t> LastRevision() const override {
    std::lock_guard lock(mutex_);
    return last_revision_;
  }
  absl::Status ScanRecords(const std::string& prefix, const std::string& after, const VisitFn& visit) const override {
    std::lock_guard lock(mutex_);
    for (auto row = after > prefix ? rows_.upper_bound(after) : rows_.lower_bound(prefix);
         row != rows_.end() && row->first.starts_with(prefix); ++row) {
      if (!visit(row->first, row->second)) break;
    }
    return absl::OkStatus();
  }

 private:
  const uint64_t capacity_bytes_;
  mutable std::mutex mutex_;  // guards all below
  std::map<std::string, std::string> rows_;
  uint64_t used_bytes_ = 0;
  uint64_t last_revision_ = 0;
};

}  // namespace

std::unique_ptr<RecordStorage> MakeMemoryRecordStorage(uint64_t capacity_bytes) {
  return std::make_unique<MemoryRecordStorage>(capacity_bytes);
}

absl::StatusOr<std::unique_ptr<RecordTable>> RecordTable::Open(RecordStorage& storage, bool durable,
                                                               const Clock& clock) {
  SPLICE_ASSIGN_OR_RETURN(const uint64_t last_revision, storage.LastRevision());
  return std::unique_ptr<RecordTable>(new RecordTable(storage, durable, clock, last_revision));
}

absl::StatusOr<Record> RecordTable::Get(const chunk::Digest& owner, const std::string& name) const {
  SPLICE_RETURN_IF_ERROR(CheckName(name));
  SPLICE_ASSIGN_OR_RETURN(const std::optional<std::string> row, storage_.ReadRecord(KeyOf(owner, name)));
  if (!row.has_value()) return Errorf(absl::StatusCode::kNotFound, "there is no record '{}'", name);
  return Decode(name, *row, true);
}

absl::StatusOr<uint64_t> RecordTable::RevisionOf(const std::string& key) const {
  SPLICE_ASSIGN_OR_RETURN(const std::optional<std::string> row, storage_.ReadRecord(key));
  if (!row.has_value()) return 0;
  SPLICE_ASSIGN_OR_RETURN(const Record record, Decode(key.substr(32), *row, false));
  return record.revision;
}

absl::StatusOr<uint64_t> RecordTable::Put(const chunk::Digest& owner, const std::string& name, const std::string& value,
                                          const PutOptions& options) {
  SPLICE_RETURN_IF_ERROR(CheckName(name));
  if (value.size() > kMaxRecordValueBytes) {
    return InvalidArgument("the value of record '{}' has {} bytes, at most {}", name, value.size(),
                           kMaxRecordValueBytes);
  }
  if (options.copy_of_revision == uint64_t{0}) return InvalidArgument("copy_of_revision 0 is no revision");
  const auto since = clock_.WallNow().time_since_epoch();
  const auto now_ms = static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(since).count());
  const std::string key = KeyOf(owner, name);
  std::lock_guard lock(mutex_);
  SPLICE_ASSIGN_OR_RETURN(const uint64_t present, RevisionOf(key));
  uint64_t revision = last_revision_ + 1;
  if (options.copy_of_revision.has_value()) {
    if (present >= *options.copy_of_revision) return present;
    revision = *options.copy_of_revision;
  } else if (options.expected_revision.has_value() && *options.expected_revision != present) {
    return Errorf(absl::StatusCode::kAborted, "record '{}' has revision {}, not {}; read it again", name, present,
                  *options.expected_revision);
  }
  const uint64_t last = std::max(last_revision_, revision);
  SPLICE_RETURN_IF_ERROR(storage_.SaveRecord(key, Encode(revision, now_ms, value), last));
  last_revision_ = last;
  if (saved_fault.armed()) SPLICE_RETURN_IF_ERROR(saved_fault.Hit().status);
  return revision;
}

absl::Status RecordTable::Delete(const chunk::Digest& owner, const std::string& name,
                                 std::optional<uint64_t> expected_revision) {
  SPLICE_RETURN_IF_ERROR(CheckName(name));
  const std::string key = KeyOf(owner, name);
  std::lock_guard lock(mutex_);
  SPLICE_ASSIGN_OR_RETURN(const uint64_t present, RevisionOf(key));
  if (present == 0) return Errorf(absl::StatusCode::kNotFound, "there is no record '{}'", name);
  if (expected_revision.has_value() && *expected_revision != present) {
    return Errorf(absl::StatusCode::kAborted, "record '{}' has revision {}, not {}; read it again", name, present,
                  *expected_revision);
  }
  return storage_.EraseRecord(key);
}

absl::StatusOr<RecordTable::Listed> RecordTable::List(const chunk::Digest& owner, const std::string& prefix,
                                                      const std::string& after, size_t max_records) const {
  if (prefix.size() > kMaxRecordNameBytes || after.size() > kMaxRecordNameBytes) {
    return InvalidArgument("prefix and after may have {} bytes at most", kMaxRecordNameBytes);
  }
  const size_t limit = max_records == 0 ? kMaxRecordsListed : std::min(max_records, kMaxRecordsListed);
  Listed listed;
  absl::Status unreadable;
  SPLICE_RETURN_IF_ERROR(storage_.ScanRecords(KeyOf(owner, prefix), after.empty() ? "" : KeyOf(owner, after),
                                              [&](std::string_view key, std::string_view row) {
                                                listed.more = listed.records.size() == limit;
                                                if (listed.more) return false;
                                                absl::StatusOr<Record> record = Decode(key.substr(32), row, false);
                                                unreadable.Update(record.status());
                                                if (record.ok()) listed.records.push_back(*std::move(record));
                                                return record.ok();
                                              }));
  SPLICE_RETURN_IF_ERROR(unreadable);
  return listed;
}

}  // namespace spl::kvstore
