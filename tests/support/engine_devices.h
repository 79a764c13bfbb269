// What tests of the engine share: devices by the name of a test's parameter, and ways to compare.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <random>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend/backend.h"
#include "kernels/backend/cuda/cuda_plugin.h"
#include "kernels/common/kv_rows.h"
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

// SPLICE_TEST_KV=fp8 runs the tests of the engine that take their models from here with K and V in FP8: what they say
// of reuse and of decoding holds for every type of pages. Null: the type that goes with the weights.
inline std::optional<kernels::DType> KvType() {
  const char* const type = std::getenv("SPLICE_TEST_KV");
  return type != nullptr && std::string_view(type) == "fp8" ? std::optional(kernels::DType::kE4M3) : std::nullopt;
}

// For logits that differ by the order of sums only. In FP8 a key that lies between two codes becomes another one for a
// difference in its last bit.
inline double OrderOfSums() { return KvType().has_value() ? 2e-2 : 1e-5; }

// Row `slot` of half a page that begins at `half`.
inline std::vector<float> KvRow(const engine::Model& model, const std::byte* half, int32_t slot) {
  std::vector<float> row(static_cast<size_t>(model.config().head_dim));
  kernels::LoadKvRow(model.kv_dtype(), model.config().head_dim, half, slot, row.data());
  return row;
}

// Clears the rows of half a page from `written` on, with their scales.
inline void ClearRowsFrom(const engine::Model& model, size_t written, std::byte* half) {
  std::vector<std::byte> kept(model.page_bytes() / 2);
  kernels::CopyKvRows(model.kv_dtype(), model.config().head_dim, half, 0, kept.data(), 0,
                      static_cast<int32_t>(written));
  std::copy(kept.begin(), kept.end(), half);
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
