#include "services/engine/model/quantizing_source.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/common/e4m3.h"
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
    SPLICE_ASSIGN_OR_RETURN(const std::vector<float> rows, WholeRows(part));
    std::vector<uint8_t> codes(static_cast<size_t>(part.width));
    std::vector<uint8_t> packed(static_cast<size_t>(part.count()));
    const int64_t columns = part.columns.size();
    for (int64_t row = 0; row < part.rows.size(); ++row) {
      const absl::StatusOr<float> scale = QuantizeRow(rows.data() + row * part.width, part.width, codes.data());
      if (!scale.ok())
        return Annotate(scale.status(), fmt::format("tensor '{}', row {}", part.name, part.rows.begin + row));
      scales.push_back(*scale);
      std::memcpy(packed.data() + row * columns, codes.data() + part.columns.begin, static_cast<size_t>(columns));
    }
    return backend_.Copy(kernels::CopyKind::kUpload, device, packed.data(), packed.size());
  }

  absl::StatusOr<std::vector<float>> Floats(const std::string& name, const std::vector<int64_t>& shape) override {
    return inner_->Floats(name, shape);
  }

 private:
  // The part's rows in their whole width, in f32 on the host.
  absl::StatusOr<std::vector<float>> WholeRows(const MatrixPart& part) {
    const MatrixPart whole = MatrixPart::Rows(part.name, part.num_rows, part.width, part.rows);
    SPLICE_ASSIGN_OR_RETURN(const MatrixType type, inner_->TypeOf(part.name, part.shape()));
    const size_t bytes = static_cast<size_t>(whole.count()) * kernels::DTypeBytes(type.dtype);
    SPLICE_ASSIGN_OR_RETURN(const auto buffer, backend_.Allocate(bytes));
    std::vector<float> no_scales;
    SPLICE_RETURN_IF_ERROR(inner_->Write(whole, buffer->data(), no_scales));
    const auto* data = static_cast<const std::byte*>(buffer->data());
    std::vector<std::byte> host;
    if (!backend_.host_memory()) {
      host.resize(bytes);
      SPLICE_RETURN_IF_ERROR(backend_.Copy(kernels::CopyKind::kDownload, host.data(), data, bytes));
      data = host.data();
    }
    std::vector<float> values(static_cast<size_t>(whole.count()));
    for (size_t i = 0; i < values.size(); ++i) values[i] = ElementAsFloat(data, type.dtype, static_cast<int64_t>(i));
    return values;
  }

  const std::unique_ptr<WeightSource> inner_;
  const kernels::Backend& backend_;
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
