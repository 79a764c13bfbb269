#include "services/kvstore/disk_index.h"

#include <rocksdb/db.h>
#include <rocksdb/options.h>
#include <rocksdb/write_batch.h>

#include <cstring>

#include "services/base/status.h"

namespace spl::kvstore {
namespace {

// Key: 'k' and the 32 bytes of the chunk key. Value: version byte 1, slot_bytes, slot, sequence (u64 little-endian).
constexpr char kKeyPrefix = 'k';
constexpr char kValueVersion = 1;
constexpr size_t kValueBytes = 1 + 3 * 8;

std::string EncodeKey(const chunk::ChunkKey& key) {
  return kKeyPrefix + std::string(reinterpret_cast<const char*>(key.bytes.data()), key.bytes.size());
}

std::string EncodeValue(const IndexEntry& entry) {
  std::string value(1, kValueVersion);
  for (const uint64_t field : {entry.slot.slot_bytes, entry.slot.slot, entry.sequence}) {
    for (int i = 0; i < 8; ++i) value.push_back(static_cast<char>(field >> (8 * i)));
  }
  return value;
}

uint64_t LoadU64(const char* bytes) {
  uint64_t value = 0;
  for (int i = 0; i < 8; ++i) value |= static_cast<uint64_t>(static_cast<uint8_t>(bytes[i])) << (8 * i);
  return value;
}

bool Decode(const rocksdb::Slice& key, const rocksdb::Slice& value, IndexEntry& entry) {
  if (key.size() != 33 || key[0] != kKeyPrefix || value.size() != kValueBytes || value[0] != kValueVersion)
    return false;
  std::memcpy(entry.key.bytes.data(), key.data() + 1, 32);
  entry.slot.slot_bytes = LoadU64(value.data() + 1);
  entry.slot.slot = LoadU64(value.data() + 9);
  entry.sequence = LoadU64(value.data() + 17);
  return true;
}

absl::Status FromRocks(const rocksdb::Status& status, const std::string& what) {
  if (status.ok()) return absl::OkStatus();
  const auto code = status.IsCorruption() ? absl::StatusCode::kDataLoss : absl::StatusCode::kUnavailable;
  return Errorf(code, "{}: {}", what, status.ToString());
}

class RocksIndex final : public DiskIndex {
 public:
  explicit RocksIndex(std::unique_ptr<rocksdb::DB> db) : db_(std::move(db)) {}

  absl::Status Add(std::span<const IndexEntry> entries) override {
    rocksdb::WriteBatch batch;
    for (const IndexEntry& entry : entries) batch.Put(EncodeKey(entry.key), EncodeValue(entry));
    rocksdb::WriteOptions options;
    options.sync = true;
    return FromRocks(db_->Write(options, &batch), "chunk index");
  }

  absl::Status Remove(std::span<const chunk::ChunkKey> keys) override {
    rocksdb::WriteBatch batch;
    for (const chunk::ChunkKey& key : keys) batch.Delete(EncodeKey(key));
    return FromRocks(db_->Write(rocksdb::WriteOptions(), &batch), "chunk index");
  }

  absl::StatusOr<uint64_t> Load(const std::function<void(const IndexEntry&)>& sink) override {
    rocksdb::WriteBatch unreadable;
    const std::unique_ptr<rocksdb::Iterator> row(db_->NewIterator(rocksdb::ReadOptions()));
    for (row->SeekToFirst(); row->Valid(); row->Next()) {
      IndexEntry entry;
      if (Decode(row->key(), row->value(), entry)) {
        sink(entry);
      } else {
        unreadable.Delete(row->key());
      }
    }
    SPLICE_RETURN_IF_ERROR(FromRocks(row->status(), "chunk index"));
    SPLICE_RETURN_IF_ERROR(FromRocks(db_->Write(rocksdb::WriteOptions(), &unreadable), "chunk index"));
    return unreadable.Count();
  }

 private:
  const std::unique_ptr<rocksdb::DB> db_;
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
  rocksdb::DB* db = nullptr;
  const rocksdb::Status status = rocksdb::DB::Open(options, dir, &db);
  if (status.ok()) return std::make_unique<RocksIndex>(std::unique_ptr<rocksdb::DB>(db));
  if (status.IsIOError() && status.ToString().find("lock") != std::string::npos) {
    return Errorf(absl::StatusCode::kFailedPrecondition, "{} is in use by another process: {}", dir, status.ToString());
  }
  return FromRocks(status,
                   fmt::format("cannot open the chunk index {}; it can be rebuilt: move the directory away", dir));
}

}  // namespace spl::kvstore
