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
  int scales = 0, zeros = 0;  // two tiles' [feature][scale group]; scales with scale_pitch
  int scale_pitch = 0;        // numbers; features that lanes read at one time lie in different banks
  int bytes = 0;
};

// Bytes of x in a layout, by how it is kept.
struct ResidentBytes {
  int64_t x = 0, scales = 0, sums = 0;
};

// With as many stages as fit, possibly none. sum_rows: an even number. turns: tiles whose scales there is room for; 1
// if no block has a second tile.
inline Layout MakeLayout(Codes codes, int feature_tiles, int sum_rows, const ResidentBytes& x, int scale_groups,
                         int turns) {
  const int warps = Warps(codes), features = 16 * feature_tiles;
  Layout at;
  at.sum_rows = sum_rows;
  at.sums_of_warp = features * sum_rows;
  at.scale_pitch = scale_groups % 4 == 0 ? scale_groups + 4 : scale_groups + 1;
  int end = 0;
  const auto place = [&](int& part, int64_t bytes) {
    part = end;
    end += static_cast<int>((bytes + 15) / 16 * 16);
  };
  place(at.x, x.x);
  place(at.x_scales, x.scales);
  place(at.x_sums, x.sums);
  place(at.sums, int64_t{2} * warps * at.sums_of_warp * 4);
  place(at.barriers, int64_t{8} * warps * kMaxStages);
  if (codes != Codes::kFp8) place(at.scales, int64_t{turns} * features * at.scale_pitch * 4);
  if (codes == Codes::kInt4) place(at.zeros, int64_t{turns} * features * scale_groups);
  const int ring = warps * StageBytes(feature_tiles);  // a stage of each
  at.stages = std::clamp((kSmemBytes - 1024 - end) / ring, 0, kMaxStages);
  for (int* part : {&at.x, &at.x_scales, &at.x_sums, &at.sums, &at.barriers, &at.scales, &at.zeros})
    *part += at.stages * ring;
  at.bytes = 1024 + at.stages * ring + end;  // 1,024 to begin at a multiple of it
  return at;
}

constexpr int64_t NumTiles(int64_t out, int feature_tiles) {
  return (out + 16 * feature_tiles - 1) / (16 * feature_tiles);
}
// Tiles of a block, at most.
constexpr int64_t TilesOfBlock(int64_t out, int feature_tiles, int num_sms) {
  return (NumTiles(out, feature_tiles) + num_sms - 1) / num_sms;
}
// Larger tiles read x less often and meet less often; smaller ones divide evenly over the SMs more often. The largest
// of most_tiles x 16 features and less that takes about as long as the smallest, and for which fits(feature_tiles) is
// true; 0 if there is none.
template <typename Fits>
int ChooseFeatureTiles(int64_t out, int num_sms, int most_tiles, const Fits& fits) {
  for (int n = most_tiles; n > 1; --n) {
    if (100 * n * TilesOfBlock(out, n, num_sms) <= 103 * TilesOfBlock(out, 1, num_sms) && fits(n)) return n;
  }
  return fits(1) ? 1 : 0;
}

struct Params : Fp8GemmParams {
  const uint8_t* zeros;  // kInt4
  int chunks;            // in a row of codes; columns past the last are zeros
  int units_of_group;    // kGroup columns of a scale group
  Layout layout;
};

}  // namespace spl::kernels::cuda
