// The choice of tokens from logits.
#include <vector>

#include "kernels/backend/cuda/cuda_backend.h"
#include "kernels/backend/cuda/cuda_session.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/sampling/argmax_cuda.h"
#include "kernels/sampling/sample_tokens_cuda.h"
#include "kernels/sampling/sampling_math.h"

namespace spl::kernels::cuda {
namespace {

// The input of a launch, before it is on the device.
struct HostRows {
  std::vector<DeviceSampleRow> rows;
  std::vector<TokenEdit> edits;
  std::vector<uint32_t> masks;

  absl::Status Add(const SampleRow& row, StagedEdits& staged) {
    DeviceSampleRow to{.random = row.random,
                       .min_weight = sampling::MinWeight(row.min_p),
                       .top_p = sampling::TopPFraction(row.top_p),
                       .scale = sampling::ScaleOf(row.temperature),
                       .repetition = row.repetition_penalty,
                       .presence = row.presence_penalty,
                       .frequency = row.frequency_penalty,
                       .logits_row = row.logits_row,
                       .top_k = row.top_k,
                       .num_top = row.num_top,
                       .num_edits = static_cast<int32_t>(row.edits.size()),
                       .bans_ends = row.bans_ends ? 1 : 0,
                       .change = {}};
    if (!row.edits.empty()) {
      const auto place = staged.PlaceOf(row);
      if (!place.ok()) return place.status();
      to.kept_edits = place->kept;
      if (place->is_sent) {
        to.edits_at = static_cast<int32_t>(edits.size());
        edits.insert(edits.end(), row.edits.begin(), row.edits.end());
      } else if (place->changed >= 0) {
        to.changed = place->changed;
        to.change = row.edits[static_cast<size_t>(place->changed)];
      }
    }
    if (!row.mask.empty()) {
      to.mask_at = static_cast<int32_t>(masks.size());
      masks.insert(masks.end(), row.mask.begin(), row.mask.end());
    }
    rows.push_back(to);
    return absl::OkStatus();
  }
};

absl::Status SampleOn(CudaSession& session, const SampleTokensArgs& a) {
  session.edits().NextStep();
  HostRows host;
  for (const SampleRow& row : a.rows) {
    if (absl::Status s = host.Add(row, session.edits()); !s.ok()) return s;
  }
  size_t scratch_bytes = 0;
  SPLICE_CUDA_RETURN_IF_ERROR(SampleTokensScratchBytes(a, &scratch_bytes), "SampleTokens");
  auto staged = session.StageArrays(CudaSession::Use::kSampleTokens, scratch_bytes,
                                    {std::as_bytes(std::span(host.rows)), std::as_bytes(std::span(host.edits)),
                                     std::as_bytes(std::span(host.masks))});
  if (!staged.ok()) return staged.status();
  auto scratch = session.Scratch(CudaSession::Use::kSampleTokens, scratch_bytes);
  if (!scratch.ok()) return scratch.status();
  const SampleTokensLaunch launch{.rows = reinterpret_cast<const DeviceSampleRow*>((*staged)[0]),
                                  .edits = reinterpret_cast<const TokenEdit*>((*staged)[1]),
                                  .masks = reinterpret_cast<const uint32_t*>((*staged)[2]),
                                  .scratch = static_cast<float*>(*scratch)};
  return ToStatus(cuda::SampleTokens(a, launch, session.stream()), "SampleTokens");
}

}  // namespace

absl::Status CudaBackend::Argmax(const KernelContext& ctx, const ArgmaxArgs& a) const {
  if (absl::Status s = ValidateArgmax(a); !s.ok()) return s;
  return ToStatus(cuda::Argmax(a, CudaSession::Of(ctx).stream()), "Argmax");
}

absl::Status CudaBackend::SampleTokens(const KernelContext& ctx, const SampleTokensArgs& a) const {
  if (absl::Status s = ValidateSampleTokens(a); !s.ok()) return s;
  if (a.rows.empty()) return absl::OkStatus();
  CudaSession& session = CudaSession::Of(ctx);
  const absl::Status status = SampleOn(session, a);
  if (!status.ok()) session.edits().Forget();
  return status;
}

}  // namespace spl::kernels::cuda
