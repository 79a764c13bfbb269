// Groups of GPUs of one process, over NCCL.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/collective/collective.h"

namespace spl::kernels::cuda {

// Rank i is GPU devices[i]. Opens NCCL at run time (cuda_libraries.h), with NVLink multicast switched off.
// Unimplemented: built without nccl.h. NotFound: no libnccl.so.2. InvalidArgument: one GPU twice.
absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> MakeNcclGroup(std::span<const int> devices);

}  // namespace spl::kernels::cuda
