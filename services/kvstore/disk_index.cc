#include "services/kvstore/disk_index.h"

#include <rocksdb/db.h>
#include <rocksdb/options.h>
#include <rocksdb/write_batch.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <map>

#include "services/base/status.h"

namespace spl::kvstore {
namespace {

// Rows by the first byte of their key; 32 bytes of a chunk key or a namespace id follow.
constexpr char kChunkPrefix = 'k';
constexpr char kNamespacePrefix = 'n';
constexpr char kBuriedPrefix = 't';
constexpr char kSlotOnlyVersion = 1;  // version byte of the oldest chunk rows: version, slot_bytes, slot, sequence
constexpr char kChunkVersion = 2;
constexpr char kNamespaceVersion = 1;
constexpr char kRecordFamily[] = "records";
// Beside the records' rows, whose keys have 33 bytes and more.
constexpr char kLastRevisionKey[] = "last-revision";

std::string RowKey(char prefix, const chunk::Digest& digest) {
  return prefix + std::string(reinterpret_cast<const char*>(digest.data()), digest.size());
}

// Little-endian fields one after another.
class RowWriter {
 public:
  explicit RowWriter(char version) : bytes_(1, version) {}
  RowWriter& U64(uint64_t value) {
    for (int i = 0; i < 8; ++i) bytes_.push_back(static_cast<char>(value >> (8 * i)));
    return *this;
  }
  RowWriter& F64(double value) { return U64(std::bit_cast<uint64_t>(value)); }
  RowWriter& Bytes(const void* data, size_t size) {
    bytes_.append(static_cast<const char*>(data), size);
    return *this;
  }
  RowWriter& Text(const std::string& text) { return U64(text.size()).Bytes(text.data(), text.size()); }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class RowReader {
 public:
  explicit RowReader(const rocksdb::Slice& row) : row_(row) {}
  uint64_t U64() {
    uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value |= static_cast<uint64_t>(static_cast<uint8_t>(Byte())) << (8 * i);
    return value;
  }
  double F64() { return std::bit_cast<double>(U64()); }
  char Byte() {
    if (row_.empty()) ok_ = false;
    const char byte = ok_ ? row_[0] : 0;
    if (ok_) row_.remove_prefix(1);
    return byte;
  }
  void Bytes(void* to, size_t size) {
    if (row_.size() < size) ok_ = false;
    if (!ok_) return;
    std::memcpy(to, row_.data(), size);
    row_.remove_prefix(size);
  }
  std::string Text() {
    const uint64_t size = U64();
    if (size > row_.size()) ok_ = false;
    std::string text(ok_ ? size : 0, '\0');
    Bytes(text.data(), text.size());
    return text;
  }
  bool Done() const { return ok_ && row_.empty(); }

 private:
  rocksdb::Slice row_;
  bool ok_ = true;
};

std::string EncodeChunk(const IndexEntry& entry) {
  RowWriter row(kChunkVersion);
  row.U64(entry.slot.slot_bytes).U64(entry.slot.slot).U64(entry.sequence);
  row.Bytes(entry.namespace_id.data(), entry.namespace_id.size()).U64(entry.incarnation);
  row.U64(entry.created_ms).U64(entry.payload_bytes).U64(static_cast<uint64_t>(entry.pin)).U64(entry.uses);
  row.F64(entry.cost_seconds).F64(entry.priority);
  row.Bytes(entry.model_fingerprint.data(), 32).Bytes(entry.layout_digest.data(), 32);
  return row.Take();
}

bool DecodeChunk(const rocksdb::Slice& key, const rocksdb::Slice& value, IndexEntry& entry) {
  std::memcpy(entry.key.bytes.data(), key.data() + 1, 32);
  RowReader row(value);
  const char version = row.Byte();
  entry.slot.slot_bytes = row.U64();
  entry.slot.slot = row.U64();
  entry.sequence = row.U64();
  if (version == kSlotOnlyVersion) {  // row of the store's first version: the other fields keep their defaults
    entry.payload_bytes = entry.slot.slot_bytes;
    return row.Done();
  }
  if (version != kChunkVersion) return false;
  row.Bytes(entry.namespace_id.data(), entry.namespace_id.size());
  entry.incarnation = row.U64();
  entry.created_ms = row.U64();
  entry.payload_bytes = row.U64();
  const uint64_t pin = row.U64();
  entry.pin = static_cast<chunk::Pin>(pin);
  entry.uses = static_cast<uint32_t>(row.U64());
  entry.cost_seconds = static_cast<float>(row.F64());
  entry.priority = row.F64();
  row.Bytes(entry.model_fingerprint.data(), 32);
  row.Bytes(entry.layout_digest.data(), 32);
  return row.Done() && pin <= static_cast<uint64_t>(chunk::Pin::kHard) && std::isfinite(entry.cost_seconds) &&
         std::isfinite(entry.priority);
}

std::string EncodeNamespace(const NamespaceRow& n) {
  RowWriter row(kNamespaceVersion);
  row.U64(n.incarnation).U64(n.created_ms).U64(n.settings.quota_bytes).U64(n.settings.quota_chunks);
  row.U64(n.settings.ttl_seconds).U64(n.settings.is_public).U64(static_cast<uint64_t>(n.settings.pin));
  row.Text(n.settings.name).Text(n.settings.owner);
  return row.Take();
}

bool DecodeNamespace(const rocksdb::Slice& key, const rocksdb::Slice& value, NamespaceRow& n) {
  std::memcpy(n.id.data(), key.data() + 1, 32);
  RowReader row(value);
  if (row.Byte() != kNamespaceVersion) return false;
  n.incarnation = row.U64();
  n.created_ms = row.U64();
  n.settings.quota_bytes = row.U64();
  n.settings.quota_chunks = row.U64();
  n.settings.ttl_seconds = row.U64();
  n.settings.is_public = row.U64() != 0;
  const uint64_t pin = row.U64();
  n.settings.pin = static_cast<chunk::Pin>(pin);
  n.settings.name = row.Text();
  n.settings.owner = row.Text();
  return row.Done() && pin <= static_cast<uint64_t>(chunk::Pin::kHard);
}

absl::Status FromRocks(const rocksdb::Status& status, const std::string& what) {
  if (status.ok()) return absl::OkStatus();
  const auto code = status.IsCorruption() ? absl::StatusCode::kDataLoss : absl::StatusCode::kUnavailable;
  return Errorf(code, "{}: {}", what, status.ToString());
}

class RocksIndex final : public DiskIndex {
 public:
  RocksIndex(std::unique_ptr<rocksdb::DB> db, rocksdb::ColumnFamilyHandle* chunks, rocksdb::ColumnFamilyHandle* records)
      : db_(std::move(db)), chunks_(chunks), records_(records) {}
  ~RocksIndex() override {
    db_->DestroyColumnFamilyHandle(records_);
    db_->DestroyColumnFamilyHandle(chunks_);
  }

  absl::Status Add(std::span<const IndexEntry> entries) override { return Write(entries, true); }
  absl::Status Update(std::span<const IndexEntry> entries) override { return Write(entries, false); }

  absl::Status Remove(std::span<const chunk::ChunkKey> keys) override {
    rocksdb::WriteBatch batch;
    for (const chunk::ChunkKey& key : keys) batch.Delete(RowKey(kChunkPrefix, key.bytes));
    return FromRocks(db_->Write(rocksdb::WriteOptions(), &batch), "chunk index");
  }

  absl::Status SaveNamespace(const NamespaceRow& row) override {
    rocksdb::WriteBatch batch;
    batch.Put(RowKey(kNamespacePrefix, row.id), EncodeNamespace(row));
    return Commit(batch, true);
  }

  absl::Status BuryNamespace(const chunk::Digest& id, uint64_t incarnation) override {
    rocksdb::WriteBatch batch;
    batch.Delete(RowKey(kNamespacePrefix, id));
    batch.Put(RowKey(kBuriedPrefix, id), RowWriter(kNamespaceVersion).U64(incarnation).Take());
    return Commit(batch, true);
  }

  absl::Status SaveRecord(const std::string& key, const std::string& row, uint64_t last_revision) override {
    rocksdb::WriteBatch batch;
    batch.Put(records_, key, row);
    batch.Put(records_, kLastRevisionKey, RowWriter(kNamespaceVersion).U64(last_revision).Take());
    return Commit(batch, true);
  }

  absl::Status EraseRecord(const std::string& key) override {
    rocksdb::WriteBatch batch;
    batch.Delete(records_, key);
    return Commit(batch, true);
  }

  absl::StatusOr<std::optional<std::string>> ReadRecord(const std::string& key) const override {
    std::string row;
    const rocksdb::Status status = db_->Get(rocksdb::ReadOptions(), records_, key, &row);
    if (status.IsNotFound()) return std::nullopt;
    SPLICE_RETURN_IF_ERROR(FromRocks(status, "records"));
    return row;
  }

  absl::StatusOr<uint64_t> LastRevision() const override {
    SPLICE_ASSIGN_OR_RETURN(const std::optional<std::string> row, ReadRecord(kLastRevisionKey));
    if (!row.has_value()) return 0;
    RowReader reader(*row);
    const char version = reader.Byte();
    const uint64_t revision = reader.U64();
    if (version == kNamespaceVersion && reader.Done()) return revision;
    return Errorf(absl::StatusCode::kDataLoss, "records: the row of the last revision is of another format");
  }

  absl::Status ScanRecords(const std::string& prefix, const std::string& after, const VisitFn& visit) const override {
    const std::unique_ptr<rocksdb::Iterator> row(db_->NewIterator(rocksdb::ReadOptions(), records_));
    // no key lies between a key and the same key with a zero byte appended
    row->Seek(after > prefix ? after + '\0' : prefix);
    for (; row->Valid() && row->key().starts_with(prefix); row->Next()) {
      const auto view = [](const rocksdb::Slice& slice) { return std::string_view(slice.data(), slice.size()); };
      if (!visit(view(row->key()), view(row->value()))) break;
    }
    return FromRocks(row->status(), "records");
  }

  absl::StatusOr<Loaded> Load() override {
    Loaded loaded;
    rocksdb::WriteBatch useless;
    std::map<chunk::Digest, uint64_t> buried;  // incarnations up to this one are dead
    const std::unique_ptr<rocksdb::Iterator> row(db_->NewIterator(rocksdb::ReadOptions()));
    for (row->SeekToFirst(); row->Valid(); row->Next()) {
      if (Take(row->key(), row->value(), loaded, buried)) continue;
      useless.Delete(row->key());
      ++loaded.num_unreadable;
    }
    SPLICE_RETURN_IF_ERROR(FromRocks(row->status(), "chunk index"));
    std::erase_if(loaded.entries, [&](const IndexEntry& entry) {
      const auto grave = buried.find(entry.namespace_id);
      if (grave == buried.end() || entry.incarnation > grave->second) return false;
      useless.Delete(RowKey(kChunkPrefix, entry.key.bytes));
      return true;
    });
    // With the last chunk of a life goes the note that it is dead.
    for (const auto& grave : buried) useless.Delete(RowKey(kBuriedPrefix, grave.first));
    SPLICE_RETURN_IF_ERROR(Commit(useless, false));
    return loaded;
  }

 private:
  static bool Take(const rocksdb::Slice& key, const rocksdb::Slice& value, Loaded& loaded,
                   std::map<chunk::Digest, uint64_t>& buried) {
    if (key.size() != 33) return false;
    if (key[0] == kChunkPrefix) {
      IndexEntry entry;
      if (!DecodeChunk(key, value, entry)) return false;
      loaded.entries.push_back(entry);
    } else if (key[0] == kNamespacePrefix) {
      NamespaceRow row;
      if (!DecodeNamespace(key, value, row)) return false;
      loaded.namespaces.push_back(std::move(row));
    } else if (key[0] == kBuriedPrefix) {
      chunk::Digest id;
      std::memcpy(id.data(), key.data() + 1, id.size());
      RowReader row(value);
      if (row.Byte() != kNamespaceVersion) return false;
      buried[id] = row.U64();
      return row.Done();
    } else {
      return false;
    }
    return true;
  }

  absl::Status Write(std::span<const IndexEntry> entries, bool sync) {
    rocksdb::WriteBatch batch;
    for (const IndexEntry& entry : entries) batch.Put(RowKey(kChunkPrefix, entry.key.bytes), EncodeChunk(entry));
    return Commit(batch, sync);
  }

  absl::Status Commit(rocksdb::WriteBatch& batch, bool sync) {
    rocksdb::WriteOptions options;
    options.sync = sync;
    return FromRocks(db_->Write(options, &batch), "chunk index");
  }

  const std::unique_ptr<rocksdb::DB> db_;
  rocksdb::ColumnFamilyHandle* const chunks_;  // the default family
  rocksdb::ColumnFamilyHandle* const records_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<DiskIndex>> DiskIndex::Open(const std::string& dir) {
  rocksdb::Options options;
  options.create_if_missing = true;
  options.compression = rocksdb::kNoCompression;  // keys are random bytes
  options.write_buffer_size = 8 << 20;
  options.max_open_files = 64;
  options.keep_log_file_num = 2;
  options.info_log_level = rocksdb::ERROR_LEVEL;
  options.create_missing_column_families = true;
  // Values of up to 16 MiB: in files beside the tree, so that compaction does not copy them again and again.
  rocksdb::ColumnFamilyOptions records(options);
  records.enable_blob_files = true;
  records.enable_blob_garbage_collection = true;
  records.min_blob_size = 16 << 10;
  rocksdb::DB* db = nullptr;
  std::vector<rocksdb::ColumnFamilyHandle*> families;
  const rocksdb::Status status = rocksdb::DB::Open(
      options, dir,
      {{rocksdb::kDefaultColumnFamilyName, rocksdb::ColumnFamilyOptions(options)}, {kRecordFamily, records}}, &families,
      &db);
  if (status.ok()) return std::make_unique<RocksIndex>(std::unique_ptr<rocksdb::DB>(db), families[0], families[1]);
  if (status.IsIOError() && status.ToString().find("lock") != std::string::npos) {
    return Errorf(absl::StatusCode::kFailedPrecondition, "{} is in use by another process: {}", dir, status.ToString());
  }
  // A file that its own lists name is gone, or they name a family that is not there.
  const bool damaged =
      status.IsCorruption() || status.IsPathNotFound() || status.IsNotFound() || status.IsInvalidArgument();
  return Errorf(damaged ? absl::StatusCode::kDataLoss : absl::StatusCode::kUnavailable,
                "cannot open the chunk index {}: {}; restore it, or start without what it knew: --reset-damaged-index",
                dir, status.ToString());
}

}  // namespace spl::kvstore
