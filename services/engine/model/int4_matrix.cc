#include "services/engine/model/int4_matrix.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "kernels/common/ceil_div.h"
#include "services/base/status.h"

namespace spl::engine {
namespace {

using kernels::CeilDiv;

constexpr int64_t kCodesPerWord = 8;
constexpr int64_t kRowsAtOnce = 32;  // of a task: 458 KiB of codes with 14,336 columns
constexpr std::string_view kWeight = ".weight";

// Where AWQ has the code of row n + i in a word that begins at row n.
constexpr int kAwqPlace[kCodesPerWord] = {0, 4, 1, 5, 2, 6, 3, 7};

struct Names {
  std::string packed, scales, zeros, groups;
};

Names NamesOf(const WeightQuantization& quantization, const std::string& name) {
  if (quantization.int4 == Int4Layout::kPacked)
    return {name + "_packed", name + "_scale", name + "_zero_point", name + "_g_idx"};
  const std::string module = name.substr(0, name.size() - std::min(name.size(), kWeight.size()));
  return {module + ".qweight", module + ".scales", module + ".qzeros", module + ".g_idx"};
}

absl::StatusOr<TensorView> FindWords(const Checkpoint& checkpoint, const std::string& name,
                                     const std::vector<int64_t>& shape, const MatrixPart& part) {
  SPLICE_ASSIGN_OR_RETURN(const TensorView tensor, checkpoint.Find(name));
  if (tensor.type != TensorType::kI32)
    return InvalidArgument("tensor '{}' is not of I32, which int4 matrices are packed in", name);
  if (tensor.shape != shape)
    return InvalidArgument("tensor '{}' has shape [{}], int4 codes of '{}', [{}, {}], need [{}]", name,
                           fmt::join(tensor.shape, ", "), part.name, part.num_rows, part.width, fmt::join(shape, ", "));
  return tensor;
}

// One matrix, or a rank's part of it.
class Int4Reader {
 public:
  Int4Reader(const Checkpoint& checkpoint, const WeightQuantization& quantization, const MatrixPart& part)
      : checkpoint_(checkpoint),
        quantization_(quantization),
        part_(part),
        names_(NamesOf(quantization, part.name)),
        groups_(quantization.group == 0 ? 1 : CeilDiv(part.width, quantization.group)) {}

  absl::Status FindCodes() {
    const bool packed = quantization_.int4 == Int4Layout::kPacked, awq = quantization_.int4 == Int4Layout::kAwq;
    const int64_t n = part_.num_rows, k = part_.width;
    if (k % kCodesPerWord != 0 || (!packed && n % kCodesPerWord != 0))
      return InvalidArgument("tensor '{}': a matrix [{}, {}] does not divide into words of {} int4 codes", part_.name,
                             n, k, kCodesPerWord);
    const std::vector<int64_t> shape = packed ? std::vector<int64_t>{n, k / kCodesPerWord}
                                       : awq  ? std::vector<int64_t>{k, n / kCodesPerWord}
                                              : std::vector<int64_t>{k / kCodesPerWord, n};
    SPLICE_ASSIGN_OR_RETURN(codes_, FindWords(checkpoint_, names_.packed, shape, part_));
    return packed ? CheckDeclaredShape() : absl::OkStatus();
  }

  absl::Status Read(kernels::ThreadPool& pool, uint8_t* codes, MatrixScales& scales) {
    SPLICE_RETURN_IF_ERROR(FindCodes());
    SPLICE_RETURN_IF_ERROR(CheckColumns());
    SPLICE_RETURN_IF_ERROR(AppendScales(scales.scales));
    if (quantization_.zero_points) SPLICE_RETURN_IF_ERROR(AppendZeros(scales.zeros));
    SPLICE_ASSIGN_OR_RETURN(order_, ColumnOrder());
    if (!order_.empty() && part_.columns.size() != part_.width)
      return InvalidArgument(
          "tensor '{}': its columns are in the order of their activations (act-order), which ranks cannot share; leave "
          "out --tp, or take a folder without act-order (desc_act false)",
          names_.groups);
    scales.column_order = order_;
    pool.ParallelFor(CeilDiv(part_.rows.size(), kRowsAtOnce), [&](int64_t task, int) { WriteRows(task, codes); });
    return absl::OkStatus();
  }

 private:
  uint32_t Word(const TensorView& tensor, int64_t at) const {
    uint32_t word;
    std::memcpy(&word, tensor.data + 4 * at, sizeof(word));
    return word;
  }

  absl::Status CheckDeclaredShape() {
    const std::string name = part_.name + "_shape";
    SPLICE_ASSIGN_OR_RETURN(const TensorView tensor, checkpoint_.Find(name, {2}));
    int64_t shape[2] = {};
    for (int i = 0; i < 2 && tensor.type == TensorType::kI64; ++i) std::memcpy(&shape[i], tensor.data + 8 * i, 8);
    for (int i = 0; i < 2 && tensor.type == TensorType::kI32; ++i) shape[i] = Word(tensor, i);
    if (shape[0] != part_.num_rows || shape[1] != part_.width)
      return InvalidArgument("tensor '{}' says [{}, {}], the model's configuration [{}, {}]", name, shape[0], shape[1],
                             part_.num_rows, part_.width);
    return absl::OkStatus();
  }

  absl::Status CheckColumns() const {
    const int64_t group = quantization_.group;
    const Range& columns = part_.columns;
    const bool whole_groups =
        group == 0 || (columns.begin % group == 0 && (columns.end % group == 0 || columns.end == part_.width));
    if (whole_groups && columns.begin % 2 == 0) return absl::OkStatus();
    return InvalidArgument(
        "tensor '{}': a rank's columns [{}, {}) cut a group of {} that has one scale; use fewer ranks (--tp)",
        part_.name, columns.begin, columns.end, group);
  }

  // Groups that the part's columns have.
  Range Groups() const {
    const int64_t group = quantization_.group;
    return group == 0 ? Range{0, 1} : Range{part_.columns.begin / group, CeilDiv(part_.columns.end, group)};
  }

  absl::Status AppendScales(std::vector<float>& scales) const {
    const bool by_row = quantization_.int4 == Int4Layout::kPacked;
    SPLICE_ASSIGN_OR_RETURN(const TensorView tensor, checkpoint_.Find(names_.scales));
    const std::vector<int64_t> shape =
        by_row ? std::vector<int64_t>{part_.num_rows, groups_} : std::vector<int64_t>{groups_, part_.num_rows};
    if (tensor.shape != shape)
      return InvalidArgument("tensor '{}' has shape [{}], '{}' in groups of {} columns needs [{}]", names_.scales,
                             fmt::join(tensor.shape, ", "), part_.name,
                             quantization_.group == 0 ? part_.width : quantization_.group, fmt::join(shape, ", "));
    SPLICE_ASSIGN_OR_RETURN(const std::vector<float> values, WidenTensor(names_.scales, tensor));
    for (size_t i = 0; i < values.size(); ++i) {
      if (!std::isfinite(values[i]) || values[i] <= 0)
        return InvalidArgument("tensor '{}': scale {} is {}, not a positive number", names_.scales, i, values[i]);
    }
    for (int64_t row = part_.rows.begin; row < part_.rows.end; ++row) {
      for (int64_t g = Groups().begin; g < Groups().end; ++g)
        scales.push_back(values[by_row ? row * groups_ + g : g * part_.num_rows + row]);
    }
    return absl::OkStatus();
  }

  absl::Status AppendZeros(std::vector<uint8_t>& zeros) const {
    const int64_t words = CeilDiv(part_.num_rows, kCodesPerWord);
    const bool by_row = quantization_.int4 == Int4Layout::kPacked;
    SPLICE_ASSIGN_OR_RETURN(
        const TensorView tensor,
        FindWords(checkpoint_, names_.zeros,
                  by_row ? std::vector<int64_t>{words, groups_} : std::vector<int64_t>{groups_, words}, part_));
    for (int64_t row = part_.rows.begin; row < part_.rows.end; ++row) {
      const int64_t word = row / kCodesPerWord;
      for (int64_t g = Groups().begin; g < Groups().end; ++g) {
        const uint32_t stored = CodeOf(Word(tensor, by_row ? word * groups_ + g : g * words + word), row);
        zeros.push_back(static_cast<uint8_t>(quantization_.zeros_less_one ? (stored + 1) & 15 : stored));
      }
    }
    return absl::OkStatus();
  }

  // The code of `row` in a word of eight rows.
  uint32_t CodeOf(uint32_t word, int64_t row) const {
    const int64_t at = row % kCodesPerWord;
    return word >> 4 * (quantization_.int4 == Int4Layout::kAwq ? kAwqPlace[at] : at) & 15;
  }

  // The columns sorted by group, or nothing where they are.
  absl::StatusOr<std::vector<int32_t>> ColumnOrder() const {
    std::vector<int32_t> order;
    if (quantization_.int4 == Int4Layout::kAwq || !checkpoint_.Contains(names_.groups)) return order;
    SPLICE_ASSIGN_OR_RETURN(const TensorView tensor, checkpoint_.Find(names_.groups, {part_.width}));
    if (tensor.type != TensorType::kI32) return InvalidArgument("tensor '{}' is not of I32", names_.groups);
    std::vector<int32_t> groups(static_cast<size_t>(part_.width));
    std::memcpy(groups.data(), tensor.data, tensor.bytes);
    if (std::find(groups.begin(), groups.end(), -1) != groups.end()) return order;  // compressed-tensors: not used
    order.resize(groups.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return groups[a] < groups[b]; });
    for (int64_t k = 0; k < part_.width; ++k) {
      const int64_t want = quantization_.group == 0 ? 0 : k / quantization_.group;
      if (groups[order[k]] != want)
        return InvalidArgument("tensor '{}': its groups do not have {} columns each (column {} is in group {})",
                               names_.groups, quantization_.group, order[k], groups[order[k]]);
    }
    if (std::is_sorted(order.begin(), order.end())) order.clear();
    return order;
  }

  // kRowsAtOnce rows, unpacked, put in order and packed again.
  void WriteRows(int64_t task, uint8_t* codes) const {
    const int64_t first = part_.rows.begin + task * kRowsAtOnce, k = part_.width;
    const int64_t count = std::min(kRowsAtOnce, part_.rows.end - first);
    std::vector<uint8_t> rows(static_cast<size_t>(count * k));
    UnpackRows(first, count, rows.data());
    const int64_t columns = part_.columns.size();
    for (int64_t i = 0; i < count; ++i) {
      const uint8_t* from = rows.data() + i * k;
      uint8_t* to = codes + (task * kRowsAtOnce + i) * (columns / 2);
      const auto code = [&](int64_t c) { return order_.empty() ? from[part_.columns.begin + c] : from[order_[c]]; };
      for (int64_t c = 0; c < columns; c += 2) to[c / 2] = static_cast<uint8_t>(code(c) | code(c + 1) << 4);
    }
  }

  // One byte a code.
  void UnpackRows(int64_t first, int64_t count, uint8_t* rows) const {
    const int64_t n = part_.num_rows, k = part_.width;
    if (quantization_.int4 == Int4Layout::kAwq) {
      for (int64_t c = 0; c < k; ++c) {
        for (int64_t i = 0; i < count; ++i)
          rows[i * k + c] = static_cast<uint8_t>(
              CodeOf(Word(codes_, c * (n / kCodesPerWord) + (first + i) / kCodesPerWord), first + i));
      }
      return;
    }
    const bool packed = quantization_.int4 == Int4Layout::kPacked;
    for (int64_t w = 0; w < k / kCodesPerWord; ++w) {
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t word = Word(codes_, packed ? (first + i) * (k / kCodesPerWord) + w : w * n + first + i);
        for (int64_t j = 0; j < kCodesPerWord; ++j)
          rows[i * k + w * kCodesPerWord + j] = static_cast<uint8_t>(word >> 4 * j & 15);
      }
    }
  }

  const Checkpoint& checkpoint_;
  const WeightQuantization& quantization_;
  const MatrixPart& part_;
  const Names names_;
  const int64_t groups_;  // of the whole matrix
  TensorView codes_;
  std::vector<int32_t> order_;
};

}  // namespace

bool HasInt4Matrix(const Checkpoint& checkpoint, const WeightQuantization& quantization, const std::string& name) {
  return quantization.int4 != Int4Layout::kNone && name.ends_with(kWeight) && !checkpoint.Contains(name) &&
         checkpoint.Contains(NamesOf(quantization, name).packed);
}

absl::StatusOr<MatrixType> Int4MatrixType(const Checkpoint& checkpoint, const WeightQuantization& quantization,
                                          const std::string& name, const std::vector<int64_t>& shape) {
  if (shape.size() != 2) return InvalidArgument("tensor '{}' is in int4, which only matrices may be", name);
  const MatrixPart whole = MatrixPart::Whole(name, shape[0], shape[1]);
  SPLICE_RETURN_IF_ERROR(Int4Reader(checkpoint, quantization, whole).FindCodes());
  return MatrixType{.dtype = kernels::DType::kInt4, .scale_group = quantization.group};
}

absl::Status ReadInt4Matrix(kernels::ThreadPool& pool, const Checkpoint& checkpoint,
                            const WeightQuantization& quantization, const MatrixPart& part, uint8_t* codes,
                            MatrixScales& scales) {
  return Int4Reader(checkpoint, quantization, part).Read(pool, codes, scales);
}

}  // namespace spl::engine
