#include "services/engine/cache/kv_memory.h"

#include "services/base/status.h"
#include "services/engine/model/model.h"

namespace spl::engine {
namespace {

kernels::KvPoolView ShapeOf(const Model& model) {
  return {.dtype = model.kv_dtype(), .head_dim = model.config().head_dim};
}

}  // namespace

KvPartitions::KvPartitions(const kernels::KvPoolView& shape, const std::vector<std::byte*>& bases,
                           int32_t pages_per_rank) {
  for (std::byte* base : bases) {
    parts_.push_back(shape);
    parts_.back().base = base;
    parts_.back().num_pages = pages_per_rank;
    parts_.back().first_page = static_cast<int32_t>(parts_.size() - 1) * pages_per_rank;
  }
}

absl::StatusOr<KvMemory> AllocateKvMemory(const Model& model, int64_t num_pages) {
  const int32_t pages_per_rank = static_cast<int32_t>(num_pages / model.num_ranks());
  std::vector<std::unique_ptr<kernels::Buffer>> buffers;
  std::vector<std::byte*> bases;
  for (int r = 0; r < model.num_ranks(); ++r) {
    SPLICE_ASSIGN_OR_RETURN(auto buffer, model.rank(r).backend().Allocate(pages_per_rank * model.page_bytes()));
    bases.push_back(static_cast<std::byte*>(buffer->data()));
    buffers.push_back(std::move(buffer));
  }
  return KvMemory{std::move(buffers), KvPartitions(ShapeOf(model), bases, pages_per_rank)};
}

KvPartitions PartitionHostMemory(const Model& model, std::byte* memory, int64_t num_pages) {
  const int32_t pages_per_rank = static_cast<int32_t>(num_pages / model.num_ranks());
  std::vector<std::byte*> bases;
  for (int r = 0; r < model.num_ranks(); ++r) bases.push_back(memory + r * pages_per_rank * model.page_bytes());
  return KvPartitions(ShapeOf(model), bases, pages_per_rank);
}

}  // namespace spl::engine
