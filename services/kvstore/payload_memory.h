// The memory that holds chunks, in the form in which they lie on disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "absl/status/statusor.h"
#include "services/chunk/chunk.h"
#include "services/kvstore/byte_arena.h"
#include "services/transport/kv_transport.h"

namespace spl::kvstore {

// Room for one chunk in a slot's form: header, payload, zeros up to a multiple of 4096. Aligned to 4096, so that the
// disk reads and writes it directly (O_DIRECT). Either a range of a PayloadMemory, which must outlive it and gets the
// range back at destruction, or memory of its own. Movable.
class SlotBuffer {
 public:
  // Allocates memory of its own. Nothing: out of memory.
  static std::optional<SlotBuffer> OnHeap(uint64_t bytes);
  SlotBuffer(ByteArena* arena, uint64_t offset, std::byte* data, uint64_t size)
      : arena_(arena), offset_(offset), data_(data), size_(size) {}
  SlotBuffer(SlotBuffer&& other) noexcept { Swap(other); }
  SlotBuffer& operator=(SlotBuffer&& other) noexcept {
    Swap(other);
    return *this;
  }
  ~SlotBuffer();

  std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }
  bool in_region() const { return arena_ != nullptr; }
  uint64_t region_offset() const { return offset_; }  // offset of data(), when in_region()

 private:
  SlotBuffer() = default;
  void Swap(SlotBuffer& other) {
    std::swap(arena_, other.arena_);
    std::swap(offset_, other.offset_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }

  ByteArena* arena_ = nullptr;
  uint64_t offset_ = 0;
  std::byte* data_ = nullptr;
  uint64_t size_ = 0;
};

// One region of fixed size: registered with a transport, so that peers read and write it by RMA, or anonymous memory
// whose pages are allocated at first use. Any thread may call.
class PayloadMemory {
 public:
  // `transport` may be null. Returns the errors of Allocate. ResourceExhausted: the system lacks the memory.
  static absl::StatusOr<std::unique_ptr<PayloadMemory>> Create(uint64_t bytes, transport::KvTransport* transport);
  ~PayloadMemory();

  // Returns a slot of SlotBytesFor(payload_bytes), or nothing if no free range is that long.
  std::optional<SlotBuffer> Take(uint64_t payload_bytes);

  uint64_t size() const { return arena_.size(); }
  uint64_t used() const { return arena_.used(); }
  const std::byte* data() const { return data_; }
  // Null: no transport.
  const transport::RegisteredMemory* registered() const { return registered_.get(); }

 private:
  explicit PayloadMemory(uint64_t bytes) : arena_(bytes) {}

  ByteArena arena_;
  std::unique_ptr<transport::RegisteredMemory> registered_;
  std::byte* data_ = nullptr;
  uint64_t mapped_bytes_ = 0;
};

}  // namespace spl::kvstore
