// Payloads on disk: one file of equal slots, each with the header and payload of one chunk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "services/chunk/chunk.h"

namespace spl::kvstore {

inline constexpr size_t kSlabAlignment = 4096;  // alignment of slots, buffers and lengths: required by O_DIRECT

// Slot size for a payload: header and payload, rounded up to one of eight sizes per power of two. At most an eighth of
// a slot is wasted, and there are few files.
uint64_t SlotBytesFor(uint64_t payload_bytes);
// Number of bytes of a slot that are written: header and payload, up to the next multiple of 4096.
uint64_t PaddedBytes(uint64_t payload_bytes);

// Owns the descriptor. Read and Write may run at the same time on different slots, from any threads; Grow, Punch and
// Sync need no order with them. Errors without a name here are Unavailable (the disk failed), with errno's text.
class SlabFile {
 public:
  // Creates the file if it is missing. DataLoss: no readable header. FailedPrecondition: another format version.
  static absl::StatusOr<std::unique_ptr<SlabFile>> Open(const std::string& path, uint64_t slot_bytes);
  ~SlabFile();

  // ResourceExhausted: the disk is full.
  absl::Status Grow(uint64_t num_slots);
  // `bytes`: an encoded header, its payload, zeros up to PaddedBytes; aligned to 4096.
  absl::Status Write(uint64_t slot, std::span<const std::byte> bytes);
  // Reads into `buffer`, which is aligned to 4096, at least as long as the written bytes and at most slot_bytes; it
  // gets the same form. Verifies everything. DataLoss: header or payload are not those that were written.
  absl::StatusOr<chunk::ChunkHeader> Read(uint64_t slot, std::span<std::byte> buffer) const;
  absl::Status Sync();                // earlier writes survive a power cut
  absl::Status Punch(uint64_t slot);  // gives the slot's blocks back to the file system

  uint64_t slot_bytes() const { return slot_bytes_; }
  uint64_t num_slots() const { return num_slots_; }
  bool direct() const { return direct_; }  // true: O_DIRECT is in use
  const std::string& path() const { return path_; }

 private:
  SlabFile(std::string path, uint64_t slot_bytes) : path_(std::move(path)), slot_bytes_(slot_bytes) {}
  absl::Status OpenFile();
  absl::Status ReadHeader();
  absl::Status WriteHeader();
  uint64_t OffsetOf(uint64_t slot) const { return kSlabAlignment + slot * slot_bytes_; }

  const std::string path_;
  const uint64_t slot_bytes_;
  int fd_ = -1;
  bool direct_ = false;
  uint64_t num_slots_ = 0;
};

}  // namespace spl::kvstore
