#include "services/engine/model/quantizing_source.h"

#include <algorithm>
#include <thread>
#include <vector>

#include "kernels/common/ceil_div.h"
#include "kernels/common/thread_pool.h"
#include "services/base/status.h"
#include "services/engine/model/fp8_quantization.h"
#include "services/engine/model/int4_quantization.h"

namespace spl::engine {
namespace {

using kernels::DType;

class QuantizingSource final : public WeightSource {
 public:
  QuantizingSource(std::unique_ptr<WeightSource> inner, const kernels::Backend& backend, QuantizeTo to)
      : inner_(std::move(inner)), backend_(backend), to_(to) {}

  bool Contains(const std::string& name) const override { return inner_->Contains(name); }

  absl::StatusOr<MatrixType> TypeOf(const std::string& name, const std::vector<int64_t>& shape) const override {
    SPLICE_ASSIGN_OR_RETURN(const MatrixType type, inner_->TypeOf(name, shape));
    if (kernels::IsQuantizedType(type.dtype))
      return InvalidArgument("tensor '{}' is in {} already: leave out --quantize", name,
                             kernels::DTypeName(type.dtype));
    if (!IsQuantizedMatrix(name)) return type;
    return to_ == QuantizeTo::kInt4 ? MatrixType{.dtype = DType::kInt4, .scale_group = kInt4Group}
                                    : MatrixType{.dtype = DType::kE4M3};
  }

  absl::Status Write(const MatrixPart& part, void* device, MatrixScales& scales) override {
    if (!IsQuantizedMatrix(part.name)) return inner_->Write(part, device, scales);
    SPLICE_ASSIGN_OR_RETURN(const HostRows rows, WholeRows(part));
    const bool int4 = to_ == QuantizeTo::kInt4;
    std::vector<uint8_t> packed(static_cast<size_t>(int4 ? part.count() / 2 : part.count()));
    const int64_t groups = int4 ? kernels::CeilDiv(part.columns.size(), kInt4Group) : 1;
    const size_t first_scale = scales.scales.size();
    scales.scales.resize(first_scale + static_cast<size_t>(part.rows.size() * groups));
    SPLICE_RETURN_IF_ERROR(Annotate(
        (int4 ? QuantizeInt4Rows : QuantizeRows)(pool_, {rows.data, rows.dtype, part.rows.size(), part.width},
                                                 part.columns, packed.data(), scales.scales.data() + first_scale),
        fmt::format("tensor '{}', rows from {}", part.name, part.rows.begin)));
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
    MatrixScales no_scales;
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
  const QuantizeTo to_;
  kernels::ThreadPool pool_{std::max(1, static_cast<int>(std::thread::hardware_concurrency()))};
};

}  // namespace

std::unique_ptr<WeightSource> MakeQuantizingSource(std::unique_ptr<WeightSource> inner, const kernels::Backend& backend,
                                                   QuantizeTo to) {
  return std::make_unique<QuantizingSource>(std::move(inner), backend, to);
}

}  // namespace spl::engine
