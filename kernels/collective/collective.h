// Sums over the ranks of a tensor-parallel group: every rank computes with a part of the weights, and after the product
// that ends a block each needs the sum of all (Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language
// Models Using Model Parallelism", 2019, section 3).
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
// Errors   a rank that fails calls Abort, and every other one's call, waiting or later, returns an error instead of
//          waiting for what will not come. A group that was aborted stays so.
// Numerics all ranks get bitwise the same sums.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // data[i] becomes the sum of all ranks' data[i], f32, in place. On a device: ordered behind the context's earlier
  // operations, not waited for, and may be recorded (Session::RunStep). Aborted: the group was; DeadlineExceeded: a
  // rank did not come in time (which aborts it).
  virtual absl::Status AllReduceSum(const KernelContext& ctx, float* data, int64_t count) = 0;
  // Any thread, any time; the first reason stays.
  virtual void Abort(const absl::Status& why) = 0;
};

// The group of ranks on the host: sums in rank order (deterministic), each rank adding up its part for all. A rank
// waits for the others `timeout` at most.
std::vector<std::unique_ptr<Communicator>> MakeHostGroup(int size, std::chrono::milliseconds timeout);
inline constexpr std::chrono::milliseconds kCollectiveTimeout{
    300'000};  // a prompt's slice on a slow host takes minutes

}  // namespace spl::kernels
