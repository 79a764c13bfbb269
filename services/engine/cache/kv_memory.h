// Memory for the KV pages of a model: one region, or one per rank, on the rank's device.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend/backend.h"
#include "kernels/common/kv_pool.h"

namespace spl::engine {

class Model;

// The parts of a page pool, one per rank, each of P pages. Pages [r P, (r + 1) P) are rank r's, so that a page's id is
// unique over all ranks. The pages of a KV head are on the rank that has the head. Borrows the memory. Immutable.
class KvPartitions {
 public:
  KvPartitions(const kernels::KvPoolView& whole) : parts_{whole} {}  // NOLINT(google-explicit-constructor): one rank
  // `bases`: the memory of each part, `pages_per_rank` pages long. `shape` gives type and head_dim.
  KvPartitions(const kernels::KvPoolView& shape, const std::vector<std::byte*>& bases, int32_t pages_per_rank);

  int num_ranks() const { return static_cast<int>(parts_.size()); }
  const kernels::KvPoolView& rank(int r) const { return parts_[r]; }
  int32_t pages_per_rank() const { return parts_[0].num_pages; }
  int32_t num_pages() const { return pages_per_rank() * num_ranks(); }
  int rank_of(int32_t page) const { return num_ranks() == 1 ? 0 : page / pages_per_rank(); }
  size_t page_bytes() const { return parts_[0].page_bytes(); }
  std::byte* k(int32_t page) const { return parts_[rank_of(page)].k(page); }

 private:
  std::vector<kernels::KvPoolView> parts_;
};

// Owns page memory on the devices of a model's ranks.
struct KvMemory {
  std::vector<std::unique_ptr<kernels::Buffer>> buffers;  // [num_ranks]
  KvPartitions pages;
};
// Allocates `num_pages` in total, rounded down to a multiple of the number of ranks. ResourceExhausted: a device has no
// room.
absl::StatusOr<KvMemory> AllocateKvMemory(const Model& model, int64_t num_pages);
// Random pages in the type of the model's K and V, for measurements: attention has something to compute. A value is an
// integer of RandomStep (kernels/fill/fill.h) times 2^step_exponent; at -7 the deviation is 0.3.
std::vector<std::byte> NoisePages(const Model& model, size_t num_pages, int32_t step_exponent = -7);
// For benchmarks: 256 such pages over and over.
absl::Status FillWithNoise(const Model& model, const KvMemory& memory, int32_t step_exponent = -7);
// The same layout over host memory of the caller, the ranks' parts one behind the other.
KvPartitions PartitionHostMemory(const Model& model, std::byte* memory, int64_t num_pages);

}  // namespace spl::engine
