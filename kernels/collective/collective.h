// Sums over the ranks of a tensor-parallel group. Every rank computes with a part of the weights. After the product
// that ends a block, each rank needs the sum of all parts (Shoeybi et al., "Megatron-LM: Training Multi-Billion
// Parameter Language Models Using Model Parallelism", 2019, section 3).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/common/kernel_context.h"

namespace spl::kernels {

// One rank's end of a group; the ranks are threads of one process. Every rank calls the same operations in the same
// order with the same counts, each on its own thread and context.
// Errors   a rank that fails calls Abort. The calls of all other ranks, waiting or later, then return an error instead
//          of waiting forever. An aborted group stays aborted.
// Numerics all ranks get bitwise the same sums.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Replaces data[i] by the sum of all ranks' data[i], f32, in place. On a device the sum is ordered after the
  // context's earlier operations, is not waited for, and may be recorded (Session::RunStep). Aborted: the group was
  // aborted. DeadlineExceeded: a rank did not arrive in time; this aborts the group.
  virtual absl::Status AllReduceSum(const KernelContext& ctx, float* data, int64_t count) = 0;
  // Any thread may call, at any time. The first reason is kept.
  virtual void Abort(const absl::Status& why) = 0;
};

// Makes a group of ranks on the host. Sums are in rank order (deterministic); each rank adds up its part for all. A
// rank waits for the others for `timeout` at most.
std::vector<std::unique_ptr<Communicator>> MakeHostGroup(int size, std::chrono::milliseconds timeout);
// Long, because a prompt's slice takes minutes on a slow host.
inline constexpr std::chrono::milliseconds kCollectiveTimeout{300'000};

}  // namespace spl::kernels
