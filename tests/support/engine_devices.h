// What tests of the engine share: devices by the name of a test's parameter, and ways to compare.
#pragma once

#include <cmath>
#include <cstdlib>
#include <random>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend/backend.h"
#include "kernels/backend/cuda/cuda_plugin.h"
#include "services/engine/model/model.h"

namespace spl::test {

// Whether the person who runs the tests wants those that can to run on a GPU: SPLICE_BACKEND is cuda.
inline bool OnGpu() {
  const char* const backend = std::getenv("SPLICE_BACKEND");
  return backend != nullptr && std::string_view(backend) == "cuda";
}

// "cuda" (an error where there is no GPU; deterministic, unless SPLICE_CUDA_DEFAULT is set, for measurements of what
// users run), "ref", or the CPU, with `num_ranks` of them.
inline absl::StatusOr<engine::Devices> DevicesOf(std::string_view kind, int num_ranks = 1) {
  engine::Devices devices;
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (kind == "cuda") {
      auto cuda = kernels::MakeCudaBackend({.deterministic = std::getenv("SPLICE_CUDA_DEFAULT") == nullptr});
      if (!cuda.ok()) return cuda.status();
      devices.push_back(*std::move(cuda));
    } else {
      devices.push_back(kind == "ref" ? kernels::MakeReferenceBackend() : kernels::MakeCpuBackend());
    }
  }
  return devices;
}

inline std::vector<int32_t> RandomTokens(std::mt19937& random, int64_t count, int32_t vocabulary = 512) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % static_cast<uint32_t>(vocabulary));
  return tokens;
}

// |got − want| / |want|.
inline double RelativeL2(std::span<const float> got, std::span<const float> want) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
    norm += double{want[i]} * want[i];
  }
  return std::sqrt(error / norm);
}

}  // namespace spl::test
