// The two attention contracts of attention.h on a CUDA device: launchers over device pointers.
//
// Pages, visibility, causality by position and numerics are those of attention.h, with two differences. The HeadRules
// are the same for every sequence of a launch and travel by value (unless DecodeArgs::plans is set). Everything that a
// CUDA graph must replay with new values (page tables, lengths, row ranges, positions, lists) is read from device
// memory.
//
// Rules served: kFull and kBand; kSelected and kElsewhere in decode; kLines for prefill of one sequence, whose heads
// with lines run in a launch of their own, beside the other heads.
//
// Tables      table of (sequence s, KV head h) starts at page_tables + table_offset[s] + h * head_stride. An entry is
//             read only for a page of which some row sees a slot; kNoPage there counts as invisible.
// Garbage     slots at or past kv_len, and pages no table lists, may hold NaN: they never reach a result.
// Results     a row's result depends only on its own query, position, rule, keys and (decode) kv_len. It is bitwise the
//             same whatever other rows or sequences share the launch, however a prompt is sliced, wherever pages lie,
//             for any scheduling and (decode) any max_kv_len. Two variants agree within Tolerance(dtype), not bitwise.
// Errors      cudaErrorNotSupported: this variant does not serve the shape, types, alignment, rule or device.
//             cudaErrorInvalidValue: the arguments contradict each other. Otherwise the CUDA runtime's error. Nothing
//             has been launched then. Values in device memory are not checked.
// Threads     launchers are thread-safe and asynchronous on `stream`; no allocation, no synchronisation. A workspace
//             belongs to one launch at a time: launches that may overlap need one each.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/kv_pool.h"
#include "kernels/common/token_selection.h"
#include "kernels/common/visibility.h"

namespace spl::kernels::cuda {

inline constexpr int kMaxKvHeads = 64;
inline constexpr int kMaxDecodeGroup = 16;        // query heads per KV head that the tensor-core decode serves
inline constexpr int kMaxDecodeKvLen = 16 << 20;  // bounds the grid

struct HeadRule {
  VisibilityRule rule = VisibilityRule::kFull;
  int32_t num_sinks = 0;  // kBand; >= 0
  int32_t window = 1;     // kBand; >= 1, counts the row itself
};

struct HeadRules {
  HeadRule head[kMaxKvHeads];  // [num_kv_heads] are used
};

// A rule in the form that kernels apply and that lies in device memory: position j is visible to a row at position p
// iff j <= p and (j < sinks or j > p - window). A window of kFullWindow makes it kFull.
inline constexpr int32_t kFullWindow = 1 << 30;
inline constexpr int32_t kSelectedWindow = 0;    // kSelected: the stream sees its list in DecodeArgs::lists
inline constexpr int32_t kElsewhereWindow = -1;  // kElsewhere: the stream's results stay unchanged
struct alignas(8) Band {
  int32_t sinks;
  int32_t window;
};

struct AttentionHeads {
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;  // divides num_qo_heads; at most kMaxKvHeads
  int32_t head_dim = 0;      // multiple of 8, at most 256
  float sm_scale = 0;        // > 0, usually 1 / sqrt(head_dim)
};

struct PagedBatch {
  const int32_t* page_tables = nullptr;   // device; the caller has added the layer's offset
  const int64_t* table_offset = nullptr;  // device [num_sequences], elements
  int64_t head_stride = 0;                // elements between the tables of two KV heads
  const int32_t* kv_len = nullptr;        // device [num_sequences]: positions [0, kv_len) have been written
  KvPoolView pool;                        // device memory, 128-byte aligned; kF32 or kBF16; decode: kE4M3, too
  int32_t num_sequences = 0;
};

// LineVisibility of all KV heads, in device memory, laid out as in LinePlan: the pointers are those of head 0; head h
// follows at h times the size of one head. A row tile is 64 rows of the sequence, counted from its first.
struct PrefillLines {
  const uint64_t* tiles = nullptr;         // [num_kv_heads, row_tiles, tile_words]
  const uint64_t* column_masks = nullptr;  // [num_kv_heads, row_tiles, column_words]
  const int32_t* columns = nullptr;        // [num_kv_heads, 64 column_words]
  const void* column_pages = nullptr;      // [num_kv_heads, column_words] pages, 128-byte aligned
  int32_t row_tiles = 0, tile_words = 0, column_words = 0;
};

struct PrefillArgs {
  AttentionHeads heads;
  HeadRules rules;
  PagedBatch batch;
  const int32_t* row_begin = nullptr;  // device [num_sequences + 1], ascending: rows of sequence s
  const int32_t* positions = nullptr;  // device [num_rows], ascending within a sequence, each < kv_len
  int32_t num_rows = 0;
  int32_t max_kv_len = 0;      // upper bound of kv_len; steers the schedule only
  DType dtype = DType::kBF16;  // type of q and out: kF32 or kBF16
  const void* q = nullptr;     // [num_rows, num_qo_heads, head_dim], row stride q_row_stride
  int64_t q_row_stride = 0;    // elements
  void* out = nullptr;         // [num_rows, num_qo_heads * head_dim], contiguous
  float* lse = nullptr;        // [num_rows, num_qo_heads] or null
  void* workspace = nullptr;   // PrefillWorkspaceBytes(); zeroed before the first launch, left zeroed by every launch
  int32_t last_rows = 0;       // > 0: computes only the last `last_rows` rows of each sequence
  PrefillLines lines;          // for heads of rule kLines
  uint64_t skip_heads = 0;     // bit h: skips KV head h; its results stay unchanged
  // True: the launch may look up its tiles before earlier kernels on the stream end (cuda_launch.h). The caller
  // promises that kernels which may still run do not write row_begin, positions, the tables or the lengths.
  bool early = false;
};

// One query row per sequence, at position kv_len - 1; a sequence with kv_len 0 gets zeros and lse = -infinity.
struct DecodeArgs {
  AttentionHeads heads;
  HeadRules rules;
  PagedBatch batch;
  int32_t max_kv_len = 0;      // every kv_len, also in later graph replays, is <= this; sizes grid and workspace
  DType dtype = DType::kBF16;  // type of q and out
  const void* q = nullptr;     // [num_sequences, num_qo_heads, head_dim], row stride q_row_stride
  int64_t q_row_stride = 0;
  void* out = nullptr;   // [num_sequences, num_qo_heads * head_dim], contiguous
  float* lse = nullptr;  // [num_sequences, num_qo_heads] or null
  // DecodeWorkspaceBytes() or more; zeroed before the first launch, then reusable for any shape
  void* workspace = nullptr;
  // True: the launch may begin before earlier kernels on the stream end (cuda_launch.h). The caller promises that
  // kernels which may still run do not write the tables, the lengths, or K and V of any page before the one that holds
  // position kv_len - 1 of each sequence.
  bool early = false;
  // Rules per sequence, read on the device: KV head h of sequence s sees plans[plan_offset[s] + h]; `rules` must be
  // kFull then. The caller has added the layer's offset. Null: `rules` apply to every sequence.
  const Band* plans = nullptr;
  const int64_t* plan_offset = nullptr;  // [num_sequences]
  // Lists for heads of rule kSelected, of every sequence (by `rules`) or of some (by `plans`). Positions are below
  // kv_len and on resident pages. Even an early launch reads them only after the previous kernel has finished.
  TokenLists lists = {};
  int32_t list_split = 0;  // list positions per block: a multiple of 64 up to 2048; 0: chosen by the length of the list
};

// kGeneric  any shape of the contract, f32 or bf16 pages and rows, SIMT: the fall-back.
// kMma      sm_80 and later; bf16; head_dim 64 or 128 (decode: at most kMaxDecodeGroup query heads per KV head).
// kSm90     compute capability 9.0 only: wgmma and TMA; prefill; otherwise as kMma.
// kMma has no kLines of its own; kAuto gives heads with lines to kSm90 or kGeneric.
// kAuto     the fastest of these that serves the arguments.
enum class Variant : uint8_t { kAuto, kGeneric, kMma, kSm90 };

size_t PrefillWorkspaceBytes();
// list_stride: DecodeArgs::lists.stride; 0 without lists. pages: type of the pool.
size_t DecodeWorkspaceBytes(const AttentionHeads& heads, int32_t num_sequences, int32_t max_kv_len,
                            int64_t list_stride = 0, DType pages = DType::kBF16);

cudaError_t PrefillAttention(const PrefillArgs& args, cudaStream_t stream, Variant variant = Variant::kAuto);
cudaError_t DecodeAttention(const DecodeArgs& args, cudaStream_t stream, Variant variant = Variant::kAuto);

}  // namespace spl::kernels::cuda
