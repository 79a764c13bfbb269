#include "services/kvstore/disk_tier.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "services/base/check.h"
#include "services/base/fault_point.h"
#include "services/base/log.h"
#include "services/base/status.h"

namespace spl::kvstore {
namespace {

namespace fs = std::filesystem;

FaultPoint synced_fault("kvstore.disk.synced");        // payloads on disk, index not
FaultPoint committed_fault("kvstore.disk.committed");  // index on disk, no caller has been told

constexpr char kVersionLine[] = "splice-kvstore data 3";
// Read, and changed to 3 at once: 1 has no namespaces, 2 no records.
constexpr const char* kOldVersionLines[] = {"splice-kvstore data 1", "splice-kvstore data 2"};
constexpr char kSlabPrefix[] = "slab-";
// Files grow in steps, so that the file system can lay slots out in long runs.
constexpr uint64_t kGrowBytes = 64 << 20;
constexpr uint64_t kGrowSlotsMax = 64;
constexpr size_t kUsedMax = 1 << 16;
constexpr size_t kUsageBatch = 256;  // rows written under the lock at a time

// Written beside, synced and renamed: a crash in between leaves another name, never a torn VERSION.
absl::Status WriteVersionFile(const std::string& path) {
  const std::string temporary = path + ".new";
  const std::string line = std::string(kVersionLine) + "\n";
  const int fd = open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  const bool written =
      fd >= 0 && write(fd, line.data(), line.size()) == static_cast<ssize_t>(line.size()) && fsync(fd) == 0;
  if (fd >= 0) close(fd);
  if (written && std::rename(temporary.c_str(), path.c_str()) == 0) return absl::OkStatus();
  return Errorf(absl::StatusCode::kUnavailable, "cannot write {}: {}", path, std::strerror(errno));
}

IndexEntry RowOf(const ChunkRecord& record, const SlotRef& slot, uint64_t sequence, double priority) {
  return {.key = record.key,
          .slot = slot,
          .sequence = sequence,
          .namespace_id = record.owner->id,
          .incarnation = record.owner->incarnation,
          .created_ms = record.created_ms,
          .payload_bytes = record.payload_bytes,
          .pin = record.pin.load(),
          .uses = record.uses.load(),
          .cost_seconds = record.cost_seconds,
          .priority = priority,
          .model_fingerprint = record.model == nullptr ? chunk::Digest{} : record.model->model_fingerprint,
          .layout_digest = record.model == nullptr ? chunk::Digest{} : record.model->layout_digest};
}

}  // namespace

absl::StatusOr<std::unique_ptr<DiskTier>> DiskTier::Open(const DiskTierOptions& options, ChunkCatalog& catalog,
                                                         NamespaceTable& namespaces) {
  auto tier = std::unique_ptr<DiskTier>(new DiskTier(options, catalog));
  std::error_code error;
  fs::create_directories(options.dir, error);
  if (error) return Errorf(absl::StatusCode::kUnavailable, "cannot create {}: {}", options.dir, error.message());
  SPLICE_RETURN_IF_ERROR(tier->CheckVersionFile());
  std::lock_guard lock(tier->mutex_);
  SPLICE_RETURN_IF_ERROR(tier->OpenSlabs());
  const auto open_index = [&]() -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(tier->index_, DiskIndex::Open(options.dir + "/index"));
    return tier->LoadIndex(namespaces);
  };
  absl::Status opened = open_index();
  if (absl::IsDataLoss(opened) && options.reset_damaged_index) {
    SPLICE_RETURN_IF_ERROR(tier->SetIndexAside(opened));
    opened = open_index();
  }
  SPLICE_RETURN_IF_ERROR(opened);
  SPLICE_RETURN_IF_ERROR(tier->Trim());
  return tier;
}

DiskTier::~DiskTier() = default;

// Chunks are not looked up in the slabs instead: those of deleted namespaces stand there, too.
absl::Status DiskTier::SetIndexAside(const absl::Status& cause) {
  index_.reset();
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  const std::string aside = fmt::format("{}/index.damaged-{}", options_.dir,
                                        std::chrono::duration_cast<std::chrono::milliseconds>(since).count());
  std::error_code error;
  fs::rename(options_.dir + "/index", aside, error);
  if (error) return Errorf(absl::StatusCode::kUnavailable, "cannot rename the index to {}: {}", aside, error.message());
  ++num_index_resets_;
  log::Error("kvstore.index_reset", log::F("kept_as", aside), log::F("cause", cause));
  return absl::OkStatus();
}

absl::Status DiskTier::CheckVersionFile() {
  const std::string path = options_.dir + "/VERSION";
  std::string line;
  if (std::ifstream file(path); file) {
    std::getline(file, line);
    if (line == kVersionLine) return absl::OkStatus();
    for (const char* const old : kOldVersionLines) {
      if (line == old) return WriteVersionFile(path);  // an older program must not open it any more
    }
    return Errorf(absl::StatusCode::kFailedPrecondition,
                  "{} says '{}', this program reads '{}'; use another --data-dir", path, line.substr(0, 80),
                  kVersionLine);
  }
  for (const fs::directory_entry& file : fs::directory_iterator(options_.dir)) {
    if (file.path().filename() == "VERSION.new") continue;  // left by a first start that was cut off
    return Errorf(absl::StatusCode::kFailedPrecondition, "{} is not empty and no chunk store; use another --data-dir",
                  options_.dir);
  }
  return WriteVersionFile(path);
}

std::string DiskTier::SlabPath(uint64_t slot_bytes) const {
  return fmt::format("{}/{}{}", options_.dir, kSlabPrefix, slot_bytes);
}

absl::Status DiskTier::OpenSlabs() {
  std::error_code error;
  for (const fs::directory_entry& file : fs::directory_iterator(options_.dir, error)) {
    const std::string name = file.path().filename();
    if (name.rfind(kSlabPrefix, 0) != 0) continue;
    uint64_t slot_bytes = 0;
    const char* const digits = name.data() + sizeof(kSlabPrefix) - 1;
    const auto [parsed_to, parse_error] = std::from_chars(digits, name.data() + name.size(), slot_bytes);
    if (parse_error != std::errc() || parsed_to != name.data() + name.size() || slot_bytes == 0 ||
        slot_bytes % kSlabAlignment != 0) {
      return Errorf(absl::StatusCode::kFailedPrecondition, "{} is no file of a chunk store", file.path().string());
    }
    SPLICE_RETURN_IF_ERROR(SlabFor(slot_bytes).status());
  }
  if (error) return Errorf(absl::StatusCode::kUnavailable, "cannot list {}: {}", options_.dir, error.message());
  return absl::OkStatus();
}

absl::StatusOr<DiskTier::Slab*> DiskTier::SlabFor(uint64_t slot_bytes) {
  const auto found = slabs_.find(slot_bytes);
  if (found != slabs_.end()) return &found->second;
  const std::string path = SlabPath(slot_bytes);
  absl::StatusOr<std::unique_ptr<SlabFile>> file = SlabFile::Open(path, slot_bytes);
  if (!file.ok() && file.status().code() == absl::StatusCode::kDataLoss) {
    // Its chunks can be computed again; refusing to start would cost more.
    log::Warning("kvstore.slab_recreated", log::F("file", path), log::F("cause", file.status()));
    std::error_code ignored;
    fs::remove(path, ignored);
    file = SlabFile::Open(path, slot_bytes);
  }
  if (!file.ok()) return file.status();
  return &slabs_.emplace(slot_bytes, Slab{std::move(file).value(), {}, {}}).first->second;
}

absl::Status DiskTier::LoadIndex(NamespaceTable& namespaces) {
  SPLICE_ASSIGN_OR_RETURN(DiskIndex::Loaded loaded, index_->Load());
  for (const NamespaceRow& row : loaded.namespaces) namespaces.Restore(row);
  num_corrupt_ += loaded.num_unreadable;
  // Newest first, so that of two entries for one slot the one that was written last wins.
  std::sort(loaded.entries.begin(), loaded.entries.end(),
            [](const auto& a, const auto& b) { return a.sequence > b.sequence; });
  std::map<uint64_t, std::set<uint64_t>> taken;
  std::vector<chunk::ChunkKey> dropped;
  std::vector<const IndexEntry*> kept;
  for (const IndexEntry& entry : loaded.entries) {
    const auto slab = slabs_.find(entry.slot.slot_bytes);
    const bool exists = slab != slabs_.end() && entry.slot.slot < slab->second.file->num_slots();
    if (exists && taken[entry.slot.slot_bytes].insert(entry.slot.slot).second) {
      kept.push_back(&entry);
    } else {
      dropped.push_back(entry.key);
    }
    next_sequence_ = std::max(next_sequence_, entry.sequence + 1);
  }
  for (auto entry = kept.rbegin(); entry != kept.rend(); ++entry) {
    const IndexEntry& row = **entry;
    used_bytes_ += row.slot.slot_bytes;
    Publish({catalog_.Restore(row), row}, true);
  }
  order_.ResumeAge();
  num_corrupt_ += dropped.size();
  for (auto& slab : slabs_) {
    const std::set<uint64_t>& used = taken[slab.first];
    backed_bytes_ += slab.second.file->num_slots() * slab.first;
    for (uint64_t slot = slab.second.file->num_slots(); slot-- > 0;) {
      if (used.count(slot) == 0) slab.second.free_backed.push_back(slot);
    }
  }
  log::Info("kvstore.disk_opened", log::F("dir", options_.dir), log::F("chunks", entries_.size()),
            log::F("bytes", used_bytes_), log::F("namespaces", loaded.namespaces.size()),
            log::F("dropped", num_corrupt_));
  return dropped.empty() ? absl::OkStatus() : index_->Remove(dropped);
}

void DiskTier::Publish(const Written& written, bool restored) {
  auto entry = std::make_shared<Entry>();
  entry->record = written.record;
  entry->slot = written.row.slot;
  entry->sequence = written.row.sequence;
  const chunk::Pin pin = written.record->pin.load();
  entry->position =
      restored ? order_.Restore(*written.record, pin, written.row.priority) : order_.Add(*written.record, pin);
  written.record->on_disk.store(true);
  entries_[written.record->key] = std::move(entry);
}

bool DiskTier::Contains(const chunk::ChunkKey& key) const {
  std::lock_guard lock(mutex_);
  return entries_.count(key) != 0;
}

absl::StatusOr<StoredChunkRef> DiskTier::Read(const chunk::ChunkKey& key, const TakeSlotFn& take_slot) {
  std::shared_ptr<Entry> entry;
  const SlabFile* file = nullptr;
  {
    std::lock_guard lock(mutex_);
    const auto found = entries_.find(key);
    if (found == entries_.end()) return nullptr;
    entry = found->second;
    ++entry->num_readers;  // keeps the slot from being used again
    file = slabs_.at(entry->slot.slot_bytes).file.get();
  }
  absl::StatusOr<StoredChunkRef> chunk = ReadSlot(*entry, *file, take_slot);
  const bool corrupt = !chunk.ok() && chunk.status().code() == absl::StatusCode::kDataLoss;
  if (corrupt) log::Warning("kvstore.chunk_dropped", log::F("key", key.ToHex()), log::F("cause", chunk.status()));
  EndRead(entry, corrupt);
  if (corrupt) return nullptr;
  return chunk;
}

absl::StatusOr<StoredChunkRef> DiskTier::ReadSlot(const Entry& entry, const SlabFile& file,
                                                  const TakeSlotFn& take_slot) {
  const chunk::ChunkKey& key = entry.record->key;
  std::optional<SlotBuffer> slot = take_slot(entry.record->payload_bytes);
  if (!slot.has_value()) {
    return Errorf(absl::StatusCode::kResourceExhausted, "no memory to read chunk {} of {} bytes", key.ToHex(),
                  entry.record->payload_bytes);
  }
  const uint64_t bytes = std::min({PaddedBytes(entry.record->payload_bytes), entry.slot.slot_bytes, slot->size()});
  SPLICE_ASSIGN_OR_RETURN(const chunk::ChunkHeader header, file.Read(entry.slot.slot, {slot->data(), bytes}));
  if (header.key != key) {
    return Errorf(absl::StatusCode::kDataLoss, "the slot holds chunk {}", header.key.ToHex());
  }
  return std::make_shared<const StoredChunk>(StoredChunk{entry.record, header, std::move(*slot)});
}

void DiskTier::EndRead(const std::shared_ptr<Entry>& entry, bool corrupt) {
  std::lock_guard lock(mutex_);
  --entry->num_readers;
  if (corrupt && entry->indexed) {
    ++num_corrupt_;
    if (absl::Status status = index_->Remove({&entry->record->key, 1}); !status.ok()) {
      log::Warning("kvstore.index_failed", log::F("cause", status));  // found and dropped again after a restart
    }
    Unlink(entry);
  } else if (!entry->indexed && entry->num_readers == 0) {
    FreeSlot(entry->slot);
  }
}

void DiskTier::Touch(const chunk::ChunkKey& key) {
  std::lock_guard lock(mutex_);
  const auto found = entries_.find(key);
  if (found != entries_.end()) TouchLocked(*found->second);
}

void DiskTier::TouchLocked(Entry& entry) {
  entry.position = order_.Touch(entry.position, entry.record->pin.load());
  if (entry.used_since || used_.size() >= kUsedMax) return;
  entry.used_since = true;
  used_.push_back(entry.record->key);
}

absl::Status DiskTier::Remove(std::span<const std::shared_ptr<ChunkRecord>> records) {
  std::vector<std::shared_ptr<Entry>> removed;  // the records they hold may end, outside the lock
  std::lock_guard lock(mutex_);
  std::vector<chunk::ChunkKey> here;
  for (const std::shared_ptr<ChunkRecord>& record : records) {
    const auto found = entries_.find(record->key);
    if (found == entries_.end() || found->second->record != record) continue;
    here.push_back(record->key);
    removed.push_back(found->second);
  }
  if (here.empty()) return absl::OkStatus();
  SPLICE_RETURN_IF_ERROR(index_->Remove(here));  // before a slot can be written again
  for (const std::shared_ptr<Entry>& entry : removed) Unlink(entry);
  return absl::OkStatus();
}

absl::Status DiskTier::SavePins(std::span<const chunk::ChunkKey> keys) {
  std::lock_guard lock(mutex_);
  std::vector<IndexEntry> rows;
  for (const chunk::ChunkKey& key : keys) {
    const auto found = entries_.find(key);
    if (found == entries_.end()) continue;
    Entry& entry = *found->second;
    entry.position = order_.SetPin(entry.position, entry.record->pin.load());
    rows.push_back(RowOf(*entry.record, entry.slot, entry.sequence, entry.position->priority));
  }
  return rows.empty() ? absl::OkStatus() : index_->Add(rows);
}

absl::Status DiskTier::FlushUsage(size_t max_entries) {
  for (size_t done = 0; done < max_entries; done += kUsageBatch) {
    // Under the lock: an entry that is evicted meanwhile must not get its row back.
    std::lock_guard lock(mutex_);
    std::vector<IndexEntry> rows;
    while (!used_.empty() && rows.size() < kUsageBatch) {
      const auto found = entries_.find(used_.front());
      used_.pop_front();
      if (found == entries_.end()) continue;
      Entry& entry = *found->second;
      entry.used_since = false;
      rows.push_back(RowOf(*entry.record, entry.slot, entry.sequence, entry.position->priority));
    }
    if (rows.empty()) return absl::OkStatus();
    SPLICE_RETURN_IF_ERROR(index_->Update(rows));
  }
  return absl::OkStatus();
}

// Takes the entry out of the maps; its slot is free once no read uses it.
void DiskTier::Unlink(const std::shared_ptr<Entry>& entry) {
  entry->indexed = false;
  entry->record->on_disk.store(false);
  order_.Remove(entry->position);
  if (entry->num_readers == 0) FreeSlot(entry->slot);
  entries_.erase(entry->record->key);
}

void DiskTier::FreeSlot(const SlotRef& slot) {
  slabs_.at(slot.slot_bytes).free_backed.push_back(slot.slot);
  used_bytes_ -= slot.slot_bytes;
}

bool DiskTier::TakeFree(Slab& slab, uint64_t& slot) {
  if (!slab.free_backed.empty()) {
    slot = slab.free_backed.back();
    slab.free_backed.pop_back();
    return true;
  }
  if (slab.free_punched.empty() || backed_bytes_ + slab.file->slot_bytes() > options_.capacity_bytes) return false;
  slot = slab.free_punched.back();
  slab.free_punched.pop_back();
  backed_bytes_ += slab.file->slot_bytes();
  return true;
}

// In the largest step that the file system has room for: a nearly full disk is used up to its last slot.
absl::StatusOr<uint64_t> DiskTier::GrowUpTo(SlabFile& file, uint64_t num_slots) {
  while (true) {
    const absl::Status grown = file.Grow(num_slots);
    if (grown.ok()) return num_slots;
    if (grown.code() != absl::StatusCode::kResourceExhausted || num_slots == 1) return grown;
    num_slots /= 2;
  }
}

absl::StatusOr<SlotRef> DiskTier::TakeSlot(uint64_t slot_bytes) {
  if (slot_bytes > options_.capacity_bytes) {
    return Errorf(absl::StatusCode::kResourceExhausted, "a chunk needs {} bytes on disk, the tier has {}", slot_bytes,
                  options_.capacity_bytes);
  }
  SPLICE_ASSIGN_OR_RETURN(Slab * slab, SlabFor(slot_bytes));
  const auto high = static_cast<uint64_t>(static_cast<double>(options_.capacity_bytes) * options_.watermarks.high);
  if (used_bytes_ > 0 && used_bytes_ + slot_bytes > high) SPLICE_RETURN_IF_ERROR(EvictForMore(slot_bytes));
  SlotRef ref{slot_bytes, 0};
  for (int attempt = 0; attempt < 3; ++attempt) {
    if (TakeFree(*slab, ref.slot)) {
      used_bytes_ += slot_bytes;
      return ref;
    }
    const uint64_t room = options_.capacity_bytes - std::min(backed_bytes_, options_.capacity_bytes);
    const uint64_t grow = std::min({room / slot_bytes, std::max<uint64_t>(kGrowBytes / slot_bytes, 1), kGrowSlotsMax});
    if (grow == 0) {
      SPLICE_RETURN_IF_ERROR(MakeRoom(slot_bytes));
      continue;
    }
    const uint64_t first = slab->file->num_slots();
    const absl::StatusOr<uint64_t> grown_by = GrowUpTo(*slab->file, grow);
    if (const absl::Status grown = grown_by.status(); !grown.ok()) {
      if (grown.code() != absl::StatusCode::kResourceExhausted || entries_.empty()) return grown;
      // The disk is fuller than the quota says: live with the slots there are.
      SPLICE_RETURN_IF_ERROR(EvictUntil(used_bytes_ - std::min(used_bytes_, slot_bytes)));
      ReleaseFree(slot_bytes, slab);
      continue;
    }
    backed_bytes_ += *grown_by * slot_bytes;
    for (uint64_t slot = first + *grown_by; slot-- > first;) slab->free_backed.push_back(slot);
  }
  return Errorf(absl::StatusCode::kResourceExhausted, "no slot of {} bytes is free: all are being read or written",
                slot_bytes);
}

absl::Status DiskTier::MakeRoom(uint64_t slot_bytes) {
  Slab* const slab = &slabs_.at(slot_bytes);
  ReleaseFree(slot_bytes, slab);
  if (backed_bytes_ + slot_bytes <= options_.capacity_bytes) return absl::OkStatus();
  SPLICE_RETURN_IF_ERROR(EvictForMore(slot_bytes));
  if (slab->free_backed.empty()) ReleaseFree(slot_bytes, slab);
  return absl::OkStatus();
}

// Down to the low watermark, with `slot_bytes` more in use.
absl::Status DiskTier::EvictForMore(uint64_t slot_bytes) {
  const auto low = static_cast<uint64_t>(static_cast<double>(options_.capacity_bytes) * options_.watermarks.low);
  return EvictUntil(std::min(low - std::min(low, slot_bytes), options_.capacity_bytes - slot_bytes));
}

absl::Status DiskTier::EvictUntil(uint64_t used_bytes_max) {
  std::vector<std::shared_ptr<Entry>> victims;
  std::vector<chunk::ChunkKey> keys;
  uint64_t freed = 0;
  for (auto at = order_.begin(); at != order_.end() && EvictionOrder::Evictable(at); ++at) {
    if (used_bytes_ - freed <= used_bytes_max) break;
    std::shared_ptr<Entry>& entry = entries_.at(at->record->key);
    if (entry->num_readers > 0) continue;
    victims.push_back(entry);
    keys.push_back(entry->record->key);
    freed += entry->slot.slot_bytes;
  }
  if (victims.empty()) return absl::OkStatus();
  SPLICE_RETURN_IF_ERROR(index_->Remove(keys));  // before a slot can be written again
  for (const std::shared_ptr<Entry>& victim : victims) {
    order_.AgeTo(victim->position);
    Unlink(victim);
  }
  num_evicted_ += keys.size();
  return absl::OkStatus();
}

// Gives free slots of other sizes back to the file system until `bytes_wanted` fit under the capacity.
void DiskTier::ReleaseFree(uint64_t bytes_wanted, const Slab* keep) {
  for (auto& named : slabs_) {
    Slab& slab = named.second;
    if (&slab == keep) continue;
    while (!slab.free_backed.empty() && backed_bytes_ + bytes_wanted > options_.capacity_bytes) {
      const uint64_t slot = slab.free_backed.back();
      if (absl::Status status = slab.file->Punch(slot); !status.ok()) {
        log::Warning("kvstore.punch_failed", log::F("cause", status));
        break;
      }
      slab.free_backed.pop_back();
      slab.free_punched.push_back(slot);
      backed_bytes_ -= slab.file->slot_bytes();
    }
  }
}

// After a start with a smaller capacity.
absl::Status DiskTier::Trim() {
  if (used_bytes_ > options_.capacity_bytes) SPLICE_RETURN_IF_ERROR(EvictUntil(options_.capacity_bytes));
  ReleaseFree(0, nullptr);
  return absl::OkStatus();
}

DiskTier::WriteResult DiskTier::Write(std::span<const StoredChunkRef> chunks) {
  std::lock_guard writing(write_mutex_);
  WriteResult result;
  while (!chunks.empty()) {
    size_t num_taken = 0;
    const absl::Status status = WriteSome(chunks, num_taken);
    if (!status.ok()) result.num_failed += num_taken;
    result.status.Update(status);
    chunks = chunks.subspan(num_taken);
  }
  return result;
}

// Writes and commits chunks from the front, up to the first for which there is no slot before the others are evictable.
// `num_taken` says how many are dealt with, at least one; on an error none of those is indexed.
absl::Status DiskTier::WriteSome(std::span<const StoredChunkRef> chunks, size_t& num_taken) {
  std::vector<Written> written;
  absl::Status status;
  for (num_taken = 0; num_taken < chunks.size() && status.ok(); ++num_taken) {
    const StoredChunk& chunk = *chunks[num_taken];
    if (chunk.record->owner->dead()) continue;  // deleted while it waited
    SlabFile* file = nullptr;
    {
      std::lock_guard lock(mutex_);
      const auto same = [&](const Written& other) { return other.row.key == chunk.header.key; };
      if (entries_.count(chunk.header.key) != 0 || std::any_of(written.begin(), written.end(), same)) continue;
      const absl::StatusOr<SlotRef> slot = TakeSlot(SlotBytesFor(chunk.header.payload_bytes));
      if (!slot.ok() && !written.empty()) break;  // commit the written chunks: that can make room for the rest
      status = slot.status();
      if (!status.ok()) continue;
      const double priority = order_.PriorityOf(*chunk.record);
      written.push_back({chunk.record, RowOf(*chunk.record, *slot, next_sequence_++, priority)});
      file = slabs_.at(slot->slot_bytes).file.get();
    }
    status = file->Write(written.back().row.slot.slot,
                         {chunk.slot.data(), static_cast<size_t>(PaddedBytes(chunk.header.payload_bytes))});
  }
  if (status.ok()) status = Commit(written);
  std::vector<std::shared_ptr<ChunkRecord>> dead;
  std::vector<chunk::ChunkKey> repinned;
  {
    std::lock_guard lock(mutex_);
    for (const Written& chunk : written) {
      if (!status.ok()) {
        FreeSlot(chunk.row.slot);
        continue;
      }
      Publish(chunk, false);
      if (chunk.record->owner->dead()) dead.push_back(chunk.record);
      if (chunk.record->pin.load() != chunk.row.pin) repinned.push_back(chunk.record->key);
    }
  }
  if (!repinned.empty()) status.Update(SavePins(repinned));
  // A namespace was deleted while its chunks were being written: the sweep has not seen them.
  if (!dead.empty()) status.Update(Remove(dead));
  return status;
}

// Payloads first, then the index: an entry never names bytes that are not there.
absl::Status DiskTier::Commit(const std::vector<Written>& written) {
  if (written.empty()) return absl::OkStatus();
  std::set<uint64_t> touched;
  std::vector<IndexEntry> rows;
  for (const Written& chunk : written) {
    touched.insert(chunk.row.slot.slot_bytes);
    rows.push_back(chunk.row);
  }
  for (const uint64_t slot_bytes : touched) {
    SlabFile* file = nullptr;
    {
      std::lock_guard lock(mutex_);
      file = slabs_.at(slot_bytes).file.get();
    }
    SPLICE_RETURN_IF_ERROR(file->Sync());
  }
  if (synced_fault.armed()) SPLICE_RETURN_IF_ERROR(synced_fault.Hit().status);
  SPLICE_RETURN_IF_ERROR(index_->Add(rows));
  if (committed_fault.armed()) (void)committed_fault.Hit();
  return absl::OkStatus();
}

DiskTier::Stats DiskTier::stats() const {
  std::lock_guard lock(mutex_);
  return {entries_.size(), used_bytes_, num_evicted_, num_corrupt_, num_index_resets_};
}

void DiskTier::CheckInvariants() const {
  std::lock_guard lock(mutex_);
  SPLICE_CHECK(order_.size() == entries_.size(), "every entry stands in the order once");
  uint64_t used = 0;
  for (const auto& named : entries_) {
    used += named.second->slot.slot_bytes;
    SPLICE_CHECK(named.second->position->record == named.second->record.get(), "the order points back");
  }
  uint64_t free_backed = 0;
  for (const auto& slab : slabs_) {
    free_backed += slab.second.free_backed.size() * slab.first;
    const uint64_t num_free = slab.second.free_backed.size() + slab.second.free_punched.size();
    SPLICE_CHECK(num_free <= slab.second.file->num_slots(), "no slot is free twice");
  }
  SPLICE_CHECK(used == used_bytes_, "used slots add up (call while idle)");
  SPLICE_CHECK(used + free_backed == backed_bytes_, "backed slots add up");
  SPLICE_CHECK(backed_bytes_ <= options_.capacity_bytes, "the quota holds");
}

}  // namespace spl::kvstore
