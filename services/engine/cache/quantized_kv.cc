#include "services/engine/cache/quantized_kv.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/common/kv_pool.h"
#include "kernels/common/kv_rows.h"
#include "services/base/check.h"

namespace spl::engine {
namespace {

using kernels::bf16;

constexpr int32_t kGroupMax = 64;
constexpr int32_t kLevels = 16;

struct GroupScale {
  bf16 minimum, step;
};
static_assert(sizeof(GroupScale) == 4);

// [K, V][64 tokens] of a page.
constexpr int32_t kRows = 2 * kernels::kPageTokens;

size_t RowBytes(int32_t head_dim, int32_t group) {
  return static_cast<size_t>(head_dim / group) * sizeof(GroupScale) + static_cast<size_t>(head_dim) / 2;
}

float FloatOf(float x) { return x; }
float FloatOf(bf16 x) { return kernels::ToFloat(x); }
void Round(float x, float& to) { to = x; }
void Round(float x, bf16& to) { to = kernels::ToBf16(x); }

// The nearest level, 0 to 15, ties to even. A sum with 1.5 * 2^23 has no fraction bits, and its last bits are the
// integer if |level| is below 2^22. That holds: one step is at least 2^-24 of the minimum, whose rounding is at most
// 2^-9 of it. Clamps integers, because compilers keep branches for comparisons of floats; std::nearbyint is a call
// without SSE4.1.
int32_t Code(float level) {
  constexpr float kNoFraction = 12582912.0f;
  const int32_t rounded = std::bit_cast<int32_t>(level + kNoFraction) - std::bit_cast<int32_t>(kNoFraction);
  return std::clamp(rounded, 0, kLevels - 1);
}

// Smallest and largest of `group` values. Takes kLanes at a time, which the compiler turns into vectors.
template <int32_t kLanes>
std::pair<float, float> Bounds(const float* values, int32_t group) {
  std::array<float, kLanes> low, high;
  std::copy_n(values, kLanes, low.begin());
  std::copy_n(values, kLanes, high.begin());
  for (int32_t i = kLanes; i < group; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const float value = values[static_cast<size_t>(i) + lane];
      low[lane] = value < low[lane] ? value : low[lane];
      high[lane] = value > high[lane] ? value : high[lane];
    }
  }
  return {*std::min_element(low.begin(), low.end()), *std::max_element(high.begin(), high.end())};
}

// Stores value i in the lower half of byte i, value i + group / 2 in the upper half. kGroup: the group's size as a
// constant for the compiler, a multiple of 8; 0: not constant.
template <int32_t kGroup, typename T>
void QuantizeRow(const T* row, int32_t head_dim, int32_t any_group, std::byte* to) {
  constexpr int32_t kLanes = kGroup == 0 ? 1 : 8;
  const int32_t group = kGroup != 0 ? kGroup : any_group, half = group / 2;
  std::byte* codes = to + static_cast<size_t>(head_dim / group) * sizeof(GroupScale);
  for (int32_t begin = 0; begin < head_dim; begin += group, to += sizeof(GroupScale), codes += half) {
    std::array<float, kGroupMax> space;
    float* const values = space.data();
    for (int32_t i = 0; i < group; ++i) values[i] = FloatOf(row[begin + i]);
    const auto [least, largest] = Bounds<kLanes>(values, group);
    GroupScale scale{.minimum = kernels::ToBf16(least), .step = {}};
    const float low = FloatOf(scale.minimum);
    scale.step = kernels::ToBf16(std::max(0.0f, largest - low) / (kLevels - 1));
    const float step = FloatOf(scale.step);
    std::memcpy(to, &scale, sizeof(scale));
    if (!(step > 0)) {
      std::memset(codes, 0, static_cast<size_t>(half));
      continue;
    }
    for (int32_t i = 0; i < half; ++i) {
      const int32_t lower = Code((values[i] - low) / step), upper = Code((values[i + half] - low) / step);
      codes[i] = static_cast<std::byte>(lower | upper << 4);
    }
  }
}

template <typename T>
void QuantizeRow(const T* row, int32_t head_dim, int32_t group, std::byte* to) {
  if (group == kGroupMax) {
    QuantizeRow<kGroupMax>(row, head_dim, group, to);
  } else {
    QuantizeRow<0>(row, head_dim, group, to);
  }
}

template <typename T>
void DequantizeRow(const std::byte* from, int32_t head_dim, int32_t group, T* row) {
  const int32_t half = group / 2;
  const std::byte* codes = from + static_cast<size_t>(head_dim / group) * sizeof(GroupScale);
  for (int32_t begin = 0; begin < head_dim; begin += group, from += sizeof(GroupScale), codes += half) {
    GroupScale scale;
    std::memcpy(&scale, from, sizeof(scale));
    const float low = FloatOf(scale.minimum), step = FloatOf(scale.step);
    std::array<T, kLevels> levels;
    for (int32_t level = 0; level < kLevels; ++level) Round(low + static_cast<float>(level) * step, levels[level]);
    for (int32_t i = 0; i < half; ++i) {
      const auto code = std::to_integer<size_t>(codes[i]);
      row[begin + i] = levels[code & 15];
      row[begin + half + i] = levels[code >> 4];
    }
  }
}

// Rows of kE4M3 are widened on their way.
void QuantizeCodes(std::span<const std::byte> page, int32_t head_dim, int32_t group, std::byte* to) {
  std::vector<float> row(static_cast<size_t>(head_dim));
  for (const std::span<const std::byte> half : {page.first(page.size() / 2), page.last(page.size() / 2)}) {
    for (int32_t slot = 0; slot < kernels::kPageTokens; ++slot, to += RowBytes(head_dim, group)) {
      kernels::LoadKvRow(kernels::DType::kE4M3, head_dim, half.data(), slot, row.data());
      QuantizeRow(row.data(), head_dim, group, to);
    }
  }
}

void DequantizeCodes(const std::byte* from, int32_t head_dim, int32_t group, std::byte* page) {
  std::vector<float> row(static_cast<size_t>(head_dim));
  for (const size_t at : {size_t{0}, kernels::HalfPageBytes(kernels::DType::kE4M3, head_dim)}) {
    for (int32_t slot = 0; slot < kernels::kPageTokens; ++slot, from += RowBytes(head_dim, group)) {
      DequantizeRow(from, head_dim, group, row.data());
      kernels::StoreKvRow(kernels::DType::kE4M3, head_dim, page + at, slot, row.data());
    }
  }
}

}  // namespace

int32_t QuantizedGroup(int32_t head_dim) {
  for (int32_t group = std::min(kGroupMax, head_dim) / 2 * 2; group > 2; group -= 2) {
    if (head_dim % group == 0) return group;
  }
  return 2;
}

size_t QuantizedPageBytes(int32_t head_dim) { return kRows * RowBytes(head_dim, QuantizedGroup(head_dim)); }

size_t QuantizedChunkBytes(const ModelConfig& config, int32_t first_layer) {
  return static_cast<size_t>(config.num_layers - first_layer) * static_cast<size_t>(config.num_kv_heads) *
         QuantizedPageBytes(config.head_dim);
}

void QuantizePage(std::span<const std::byte> page, kernels::DType dtype, int32_t head_dim, std::byte* to) {
  SPLICE_CHECK(page.size() == kernels::KvPageBytes(dtype, head_dim), "one page");
  const int32_t group = QuantizedGroup(head_dim);
  if (dtype == kernels::DType::kE4M3) return QuantizeCodes(page, head_dim, group, to);
  const size_t row_bytes = page.size() / kRows, to_bytes = RowBytes(head_dim, group);
  for (size_t r = 0; r < kRows; ++r, to += to_bytes) {
    const std::byte* const row = page.data() + r * row_bytes;
    if (dtype == kernels::DType::kF32) {
      QuantizeRow(reinterpret_cast<const float*>(row), head_dim, group, to);
    } else {
      QuantizeRow(reinterpret_cast<const bf16*>(row), head_dim, group, to);
    }
  }
}

void DequantizePage(std::span<const std::byte> quantized, kernels::DType dtype, int32_t head_dim, std::byte* page) {
  SPLICE_CHECK(quantized.size() == QuantizedPageBytes(head_dim), "one page");
  const int32_t group = QuantizedGroup(head_dim);
  if (dtype == kernels::DType::kE4M3) return DequantizeCodes(quantized.data(), head_dim, group, page);
  const size_t row_bytes = static_cast<size_t>(head_dim) * kernels::DTypeBytes(dtype);
  const size_t from_bytes = RowBytes(head_dim, group);
  const std::byte* from = quantized.data();
  for (size_t r = 0; r < kRows; ++r, from += from_bytes) {
    std::byte* const row = page + r * row_bytes;
    if (dtype == kernels::DType::kF32) {
      DequantizeRow(from, head_dim, group, reinterpret_cast<float*>(row));
    } else {
      DequantizeRow(from, head_dim, group, reinterpret_cast<bf16*>(row));
    }
  }
}

}  // namespace spl::engine
