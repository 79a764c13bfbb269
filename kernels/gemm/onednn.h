// oneDNN as a single-core matrix product in f32. Every call runs on the calling thread alone; the context's pool is the
// only parallelism. A second (OpenMP) team would fight it for the cores, and a product that oneDNN splits over threads
// by itself could sum in another order for another number of rows or threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/gemm/gemm.h"

namespace spl::kernels::cpu {

// Limit of rows per product; longer inputs are cut. At 128 rows the product runs at its full rate. The limit also keeps
// the set of generated programs small (one per number of rows and shape).
inline constexpr int64_t kOneDnnRowsMax = 128;

// A weight in oneDNN's blocked layout, widened to f32. Thread-safe after construction.
class OneDnnMatrix {
 public:
  // Unimplemented: oneDNN has no blocked product ("brgemm") on this machine, or libsplice_onednn.so is missing. That
  // plug-in brings oneDNN (40 MB), which only the CPU backend needs.
  static absl::StatusOr<std::unique_ptr<OneDnnMatrix>> Pack(const WeightView& weight);
  virtual ~OneDnnMatrix() = default;

  // Column slices begin at multiples of this.
  virtual int64_t column_block() const = 0;

  // y[i, 0 .. num_columns) = x[i] · W[begin .. begin + num_columns)ᵀ (+ bias[begin …]) for num_rows in
  // [1, kOneDnnRowsMax]; y is contiguous: [num_rows, num_columns].
  virtual absl::Status Multiply(const float* x, int64_t num_rows, int64_t begin, int64_t num_columns, const float* bias,
                                float* y) const = 0;
};

// True if the plug-in could be opened; the first call tries.
bool HaveOneDnn();

// The plug-in's export: name and signature.
inline constexpr char kOneDnnPluginPack[] = "splice_onednn_pack";
using OneDnnPluginPack = OneDnnMatrix* (*)(const char* build, const WeightView& weight, absl::Status& error);

}  // namespace spl::kernels::cpu
