#include "services/kvstore/payload_memory.h"

#include <sys/mman.h>

#include <cstdlib>

#include "services/base/status.h"
#include "services/kvstore/slab_file.h"

namespace spl::kvstore {

std::optional<SlotBuffer> SlotBuffer::OnHeap(uint64_t bytes) {
  SlotBuffer buffer;
  buffer.data_ = static_cast<std::byte*>(std::aligned_alloc(kSlabAlignment, bytes));
  if (buffer.data_ == nullptr) return std::nullopt;
  buffer.size_ = bytes;
  return buffer;
}

SlotBuffer::~SlotBuffer() {
  if (arena_ != nullptr) {
    arena_->Give(offset_, size_);
  } else {
    std::free(data_);
  }
}

absl::StatusOr<std::unique_ptr<PayloadMemory>> PayloadMemory::Create(uint64_t bytes,
                                                                     transport::KvTransport* transport) {
  bytes = bytes / kSlabAlignment * kSlabAlignment;
  auto memory = std::unique_ptr<PayloadMemory>(new PayloadMemory(bytes));
  if (bytes == 0) return memory;
  if (transport != nullptr) {
    SPLICE_ASSIGN_OR_RETURN(memory->registered_, transport->Allocate(bytes));
    memory->data_ = memory->registered_->data();
    return memory;
  }
  void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    return Errorf(absl::StatusCode::kResourceExhausted, "no {} bytes of memory for chunks; lower --memory-bytes",
                  bytes);
  }
  memory->data_ = static_cast<std::byte*>(mapped);
  memory->mapped_bytes_ = bytes;
  return memory;
}

PayloadMemory::~PayloadMemory() {
  if (mapped_bytes_ > 0) munmap(data_, mapped_bytes_);
}

std::optional<SlotBuffer> PayloadMemory::Take(uint64_t payload_bytes) {
  const uint64_t bytes = SlotBytesFor(payload_bytes);
  const std::optional<uint64_t> offset = arena_.Take(bytes);
  if (!offset.has_value()) return std::nullopt;
  return SlotBuffer(&arena_, *offset, data_ + *offset, bytes);
}

}  // namespace spl::kvstore
