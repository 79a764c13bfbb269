#include <array>
#include <cstring>
#include <mutex>
#include <utility>

#include "kernels/common/parallel.h"
#include "kernels/common/scratch.h"
#include "kernels/common/status.h"
#include "kernels/moe/grouped_linear_host.h"
#include "kernels/moe/moe_isa.h"
#include "kernels/moe/routing.h"

namespace spl::kernels::cpu {
namespace {

// The product of one expert. Its rows of x are contiguous once gathered, and then it is an ordinary Linear.
absl::Status RunExpert(const KernelContext& ctx, const GroupedLinearArgs& a, const HostGroupedWeight& w, int32_t e) {
  thread_local Scratch scratch;
  const int64_t begin = a.offsets[e], num_rows = a.offsets[e + 1] - begin, k = w.in_features();
  const float* x = a.x + begin * k;
  if (a.rows != nullptr) {
    float* gathered = scratch.Floats(static_cast<size_t>(num_rows * k));
    for (int64_t i = 0; i < num_rows; ++i)
      std::memcpy(gathered + i * k, a.x + a.rows[begin + i] * k, static_cast<size_t>(k) * sizeof(float));
    x = gathered;
  }
  return cpu::Linear(ctx, {x, &w.expert(e), nullptr, a.y + begin * w.out_features(), num_rows});
}

}  // namespace

absl::StatusOr<std::unique_ptr<GroupedWeight>> PackGrouped(const GroupedWeightView& view, GemmCompute compute) {
  return HostGroupedWeight::Make(view, [&](const WeightView& w) { return cpu::PackLinear(w, compute); });
}

// Experts with rows are divided among the threads; when there are fewer of them than threads, each product is. Linear's
// results do not depend on either.
absl::Status GroupedLinear(const KernelContext& ctx, const GroupedLinearArgs& a) {
  if (absl::Status s = ValidateHostGroupedLinear(a); !s.ok() || a.num_places == 0) return s;
  const auto* w = dynamic_cast<const HostGroupedWeight*>(a.weight);
  if (w == nullptr) return InvalidCall("GroupedLinear: the weight was packed by another backend");
  std::array<int32_t, kMoeExpertsMax> active;
  int32_t num_active = 0;
  for (int32_t e = 0; e < w->num_experts(); ++e) {
    if (a.offsets[e + 1] > a.offsets[e]) active[static_cast<size_t>(num_active++)] = e;
  }
  std::mutex mutex;  // guards error
  absl::Status error;
  const auto run = [&](const KernelContext& run_ctx, int64_t i) {
    absl::Status s = RunExpert(run_ctx, a, *w, active[static_cast<size_t>(i)]);
    if (s.ok()) return;
    std::lock_guard<std::mutex> lock(mutex);
    if (error.ok()) error = std::move(s);
  };
  if (num_active < NumThreads(ctx)) {
    for (int32_t i = 0; i < num_active; ++i) run(ctx, i);
  } else {
    KernelContext alone = ctx;
    alone.pool = nullptr;
    ParallelTasks(ctx, num_active, [&](int64_t i) { run(alone, i); });
  }
  return error;
}

absl::Status CombineExperts(const KernelContext& ctx, const CombineExpertsArgs& a) {
  if (absl::Status s = ValidateHostCombineExperts(a); !s.ok()) return s;
  const MoeKernels& kernels = MoeKernelsFor(ctx.isa);
  ParallelRows(ctx, a.num_rows, (int64_t{32} << 10) / (a.width * a.top_k), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t pair = i * a.top_k;
      kernels.combine_row(a.y, a.places + pair, a.weights + pair, a.top_k, a.width, a.out + i * a.width);
    }
  });
  return absl::OkStatus();
}

}  // namespace spl::kernels::cpu
