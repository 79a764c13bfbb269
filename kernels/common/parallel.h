// Splits row-wise work over the pool of a context, or runs it inline when waking a worker would cost more than it saves.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/kernel_context.h"

namespace spl::kernels {

inline int NumThreads(const KernelContext& ctx) { return ctx.pool == nullptr ? 1 : ctx.pool->num_threads(); }

// Calls body(begin, end) over disjoint ranges that cover [0, num_rows), each of about `grain` rows. Choose grain so that
// one range is at least some 10 us of work: handing it to another core costs about 1 us.
template <typename Body>
void ParallelRows(const KernelContext& ctx, int64_t num_rows, int64_t grain, const Body& body) {
  grain = std::max<int64_t>(grain, 1);
  const int64_t num_tasks = (num_rows + grain - 1) / grain;
  if (num_tasks <= 1 || NumThreads(ctx) == 1) {
    if (num_rows > 0) body(int64_t{0}, num_rows);
    return;
  }
  ctx.pool->ParallelFor(num_tasks, [&](int64_t task, int) {
    body(task * grain, std::min(num_rows, (task + 1) * grain));
  });
}

// As above for any task list: inline without a pool.
template <typename Body>
void ParallelTasks(const KernelContext& ctx, int64_t num_tasks, const Body& body) {
  if (num_tasks <= 1 || NumThreads(ctx) == 1) {
    for (int64_t task = 0; task < num_tasks; ++task) body(task);
    return;
  }
  ctx.pool->ParallelFor(num_tasks, [&](int64_t task, int) { body(task); });
}

}  // namespace spl::kernels
