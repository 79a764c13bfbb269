#include "services/engine/cache/kv_memory.h"

#include <algorithm>
#include <cmath>

#include "kernels/common/kv_rows.h"
#include "kernels/fill/fill.h"
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

std::vector<std::byte> NoisePages(const Model& model, size_t num_pages, int32_t step_exponent) {
  const int32_t head_dim = model.config().head_dim;
  const size_t half_bytes = model.page_bytes() / 2;
  std::vector<std::byte> pages(2 * num_pages * half_bytes);
  std::vector<float> row(static_cast<size_t>(head_dim));
  const float step = std::ldexp(1.0f, step_exponent);
  uint64_t index = 0;
  for (size_t half = 0; half < 2 * num_pages; ++half) {
    for (int32_t slot = 0; slot < kernels::kPageTokens; ++slot) {
      for (float& x : row) x = static_cast<float>(kernels::RandomStep(0, index++)) * step;
      kernels::StoreKvRow(model.kv_dtype(), head_dim, pages.data() + half * half_bytes, slot, row.data());
    }
  }
  return pages;
}

absl::Status FillWithNoise(const Model& model, const KvMemory& memory, int32_t step_exponent) {
  const std::vector<std::byte> pages = NoisePages(model, 256, step_exponent);
  for (size_t r = 0; r < memory.buffers.size(); ++r) {
    const kernels::Buffer& part = *memory.buffers[r];
    auto* const to = static_cast<std::byte*>(part.data());
    for (size_t at = 0; at < part.size(); at += pages.size())
      SPLICE_RETURN_IF_ERROR(
          model.rank(static_cast<int>(r))
              .backend()
              .Copy(kernels::CopyKind::kUpload, to + at, pages.data(), std::min(pages.size(), part.size() - at)));
  }
  return absl::OkStatus();
}

}  // namespace spl::engine
