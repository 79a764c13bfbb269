#include "services/engine/model/quantizing_source.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "kernels/common/e4m3.h"
#include "kernels/common/thread_pool.h"
#include "services/base/status.h"

namespace spl::engine {
namespace {

using kernels::DType;

class QuantizingSource final : public WeightSource {
 public:
  QuantizingSource(std::unique_ptr<WeightSource> inner, const kernels::Backend& backend)
      : inner_(std::move(inner)), backend_(backend) {}

  bool Contains(const std::string& name) const override { return inner_->Contains(name); }

  absl::StatusOr<MatrixType> TypeOf(const std::string& name, const std::vector<int64_t>& shape) const override {
    SPLICE_ASSIGN_OR_RETURN(const MatrixType type, inner_->TypeOf(name, shape));
    if (type.dtype == DType::kE4M3) return InvalidArgument("tensor '{}' is in FP8 already: leave out --quantize", name);
    return IsQuantizedMatrix(name) ? MatrixType{.dtype = DType::kE4M3} : type;
  }

  absl::Status Write(const MatrixPart& part, void* device, std::vector<float>& scales) override {
    if (!IsQuantizedMatrix(part.name)) return inner_->Write(part, device, scales);
    SPLICE_ASSIGN_OR_RETURN(const HostRows rows, WholeRows(part));
    const int64_t num_rows = part.rows.size(), columns = part.columns.size();
    std::vector<uint8_t> packed(static_cast<size_t>(part.count()));
    std::vector<absl::StatusOr<float>> scale_of(static_cast<size_t>(num_rows), 0.0f);
    pool_.ParallelFor(num_rows, [&](int64_t row, int) {
      std::vector<float> values(static_cast<size_t>(part.width));
      for (int64_t i = 0; i < part.width; ++i) values[i] = ElementAsFloat(rows.data, rows.dtype, row * part.width + i);
      std::vector<uint8_t> codes(static_cast<size_t>(part.width));
      scale_of[row] = QuantizeRow(values.data(), part.width, codes.data());
      std::memcpy(packed.data() + row * columns, codes.data() + part.columns.begin, static_cast<size_t>(columns));
    });
    for (int64_t row = 0; row < num_rows; ++row) {
      if (!scale_of[row].ok())
        return Annotate(scale_of[row].status(), fmt::format("tensor '{}', row {}", part.name, part.rows.begin + row));
      scales.push_back(*scale_of[row]);
    }
    return backend_.Copy(kernels::CopyKind::kUpload, device, packed.data(), packed.size());
  }

  absl::StatusOr<std::vector<float>> Floats(const std::string& name, const std::vector<int64_t>& shape) override {
    return inner_->Floats(name, shape);
  }

 private:
  struct HostRows {
    std::unique_ptr<kernels::Buffer> buffer;  // of the backend
    std::vector<std::byte> copy;              // of its memory, if that is not the host's
    const std::byte* data = nullptr;
    DType dtype = DType::kF32;
  };
  // The part's rows in their whole width, on the host.
  absl::StatusOr<HostRows> WholeRows(const MatrixPart& part) {
    const MatrixPart whole = MatrixPart::Rows(part.name, part.num_rows, part.width, part.rows);
    SPLICE_ASSIGN_OR_RETURN(const MatrixType type, inner_->TypeOf(part.name, part.shape()));
    const size_t bytes = static_cast<size_t>(whole.count()) * kernels::DTypeBytes(type.dtype);
    HostRows rows{.dtype = type.dtype};
    SPLICE_ASSIGN_OR_RETURN(rows.buffer, backend_.Allocate(bytes));
    std::vector<float> no_scales;
    SPLICE_RETURN_IF_ERROR(inner_->Write(whole, rows.buffer->data(), no_scales));
    rows.data = static_cast<const std::byte*>(rows.buffer->data());
    if (backend_.host_memory()) return rows;
    rows.copy.resize(bytes);
    SPLICE_RETURN_IF_ERROR(backend_.Copy(kernels::CopyKind::kDownload, rows.copy.data(), rows.data, bytes));
    rows.data = rows.copy.data();
    rows.buffer.reset();
    return rows;
  }

  const std::unique_ptr<WeightSource> inner_;
  const kernels::Backend& backend_;
  kernels::ThreadPool pool_{std::max(1, static_cast<int>(std::thread::hardware_concurrency()))};
};

}  // namespace

absl::StatusOr<float> QuantizeRow(const float* values, int64_t count, uint8_t* codes) {
  float largest = 0;
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) {
    finite &= std::isfinite(values[i]);
    largest = std::max(largest, std::fabs(values[i]));
  }
  if (!finite) return InvalidArgument("a weight is NaN or infinite");
  const float scale = largest == 0 ? 1.0f : largest / kernels::kE4M3Max;
  if (!std::isnormal(scale)) return InvalidArgument("the largest weight, {}, is too small to quantize", largest);
  for (int64_t i = 0; i < count; ++i) codes[i] = kernels::FloatToE4M3(values[i] / scale);
  return scale;
}

bool IsQuantizedMatrix(const std::string& name) { return name.ends_with("_proj.weight"); }

std::unique_ptr<WeightSource> MakeQuantizingSource(std::unique_ptr<WeightSource> inner,
                                                   const kernels::Backend& backend) {
  return std::make_unique<QuantizingSource>(std::move(inner), backend);
}

}  // namespace spl::engine
