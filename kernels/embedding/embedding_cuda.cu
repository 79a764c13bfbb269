#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_types.h"
#include "kernels/embedding/embedding_cuda.h"

namespace spl::kernels::cuda {
namespace {

template <typename From, typename To>
__global__ void GatherRowsKernel(const From* table, const int32_t* ids, const int32_t* last_tokens, To* out,
                                 int64_t width) {
  LetNextStart();
  WaitForPrevious();
  const int32_t id = ids[blockIdx.x];
  const From* from = table + static_cast<int64_t>(id < 0 ? last_tokens[-1 - id] : id) * width;
  To* to = out + static_cast<int64_t>(blockIdx.x) * width;
  for (int64_t c = threadIdx.x * 4; c < width; c += blockDim.x * 4) {
    const float4 v = {ToF(from[c]), ToF(from[c + 1]), ToF(from[c + 2]), ToF(from[c + 3])};
    Store4(to + c, v);
  }
}

template <typename From>
cudaError_t LaunchFrom(const GatherRowsArgs& a, const int32_t* ids, int64_t num_rows, cudaStream_t stream) {
  const From* table = static_cast<const From*>(a.table);
  const unsigned rows = static_cast<unsigned>(num_rows);
  if (a.out.dtype == DType::kF32)
    return LaunchEarly(GatherRowsKernel<From, float>, rows, 256, 0, stream, table, ids, a.last_tokens,
                       static_cast<float*>(a.out.data), a.width);
  if (a.out.dtype == DType::kBF16)
    return LaunchEarly(GatherRowsKernel<From, __nv_bfloat16>, rows, 256, 0, stream, table, ids, a.last_tokens,
                       static_cast<__nv_bfloat16*>(a.out.data), a.width);
  return cudaErrorNotSupported;
}

}  // namespace

cudaError_t GatherRows(const GatherRowsArgs& a, const int32_t* device_ids, int64_t num_rows, cudaStream_t stream) {
  if (num_rows == 0) return cudaSuccess;
  if (a.width % 4 != 0) return cudaErrorNotSupported;
  switch (a.dtype) {
    case DType::kF32:
      return LaunchFrom<float>(a, device_ids, num_rows, stream);
    case DType::kBF16:
      return LaunchFrom<__nv_bfloat16>(a, device_ids, num_rows, stream);
    case DType::kF16:
      return LaunchFrom<__half>(a, device_ids, num_rows, stream);
    case DType::kE4M3:
    case DType::kInt4:
      break;
  }
  return cudaErrorNotSupported;
}

}  // namespace spl::kernels::cuda
