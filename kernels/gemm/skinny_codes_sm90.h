// Parameters and shared memory of skinny_codes_gemm_cuda_sm90.cu. Included by .cu files only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/gemm/fp8_gemm_device.h"
#include "kernels/gemm/resident_x_sm90.h"

namespace spl::kernels::cuda {

inline constexpr int kMaxRows = kResidentRows, kGroup = kResidentGroup;
inline constexpr int kRowBytes = 128;  // a chunk of a feature
inline constexpr int kMaxStages = 8, kMinStages = 2;
// A block's, where it may have 227 KiB: with more, the kernels between two products find no room beside it, and
// begin only when it ends (measured: 110 to 150 KiB are best, 227 cost 3 to 6 % of a step).
inline constexpr int kSmemBytes = 150 * 1024;

enum class Codes { kFp8, kFp8Groups, kInt4 };
// Warps of a block, measured: more hide the waits of short chunks, fewer leave registers for what widens int4 codes.
constexpr int Warps(Codes codes) { return codes == Codes::kInt4 ? 8 : 16; }
constexpr int GroupsOfChunk(Codes codes) { return codes == Codes::kInt4 ? 2 : 1; }
constexpr int StageBytes(int feature_tiles) { return 16 * feature_tiles * kRowBytes; }

// The places of a block's shared memory, from a multiple of 1,024 bytes on.
struct Layout {
  int stages = 0;
  int sum_rows = 0, sums_of_warp = 0;   // a feature's, an even number; numbers
  int x = 0, x_scales = 0, x_sums = 0;  // behind the rings (ResidentX)
  int sums = 0;                         // two sets [warp][feature][row], so that warps may be a tile apart
  int barriers = 0;
  int scales = 0, zeros = 0;  // two tiles' [feature][scale group]; scales with a pitch of one more
  int bytes = 0;
};

// With as many stages as fit, possibly none.
template <Codes kCodes>
Layout MakeLayout(int feature_tiles, int rows, int chunks, int scale_groups) {
  constexpr int warps = Warps(kCodes);
  const int features = 16 * feature_tiles, groups = chunks * GroupsOfChunk(kCodes);
  Layout at;
  at.sum_rows = (rows + 1) / 2 * 2;
  at.sums_of_warp = features * at.sum_rows;
  int end = 0;
  const auto place = [&](int& part, int64_t bytes) {
    part = end;
    end += static_cast<int>((bytes + 15) / 16 * 16);
  };
  place(at.x, int64_t{2} * groups * rows * kGroup);
  place(at.x_scales, int64_t{4} * groups * kMaxRows);
  place(at.x_sums, int64_t{4} * groups * kMaxRows);
  place(at.sums, int64_t{2} * warps * at.sums_of_warp * 4);
  place(at.barriers, int64_t{8} * warps * kMaxStages);
  if (kCodes != Codes::kFp8) place(at.scales, int64_t{2} * features * (scale_groups + 1) * 4);
  if (kCodes == Codes::kInt4) place(at.zeros, int64_t{2} * features * scale_groups);
  const int ring = warps * StageBytes(feature_tiles);  // a stage of each
  at.stages = std::clamp((kSmemBytes - 1024 - end) / ring, 0, kMaxStages);
  for (int* part : {&at.x, &at.x_scales, &at.x_sums, &at.sums, &at.barriers, &at.scales, &at.zeros})
    *part += at.stages * ring;
  at.bytes = 1024 + at.stages * ring + end;  // 1,024 to begin at a multiple of it
  return at;
}

struct Params : Fp8GemmParams {
  const uint8_t* zeros;  // kInt4
  int chunks;            // in a row of codes; columns past the last are zeros
  int units_of_group;    // kGroup columns of a scale group
  Layout layout;
};

}  // namespace spl::kernels::cuda
