#include "services/engine/methods/recovery_methods.h"

#include <algorithm>
#include <iterator>

#include "services/base/status.h"
#include "services/engine/recovery/baselines/band.h"
#include "services/engine/recovery/baselines/cacheblend.h"
#include "services/engine/recovery/baselines/epic.h"
#include "services/engine/recovery/baselines/minference.h"
#include "services/engine/recovery/baselines/naive.h"
#include "services/engine/recovery/baselines/samkv_paper.h"
#include "services/engine/recovery/exact.h"
#include "services/engine/recovery/loopserve.h"
#include "services/engine/recovery/redknot.h"
#include "services/engine/recovery/samkv.h"
#include "services/engine/recovery/sparsex.h"
#include "services/engine/recovery/sparsex_probe.h"
#include "services/engine/recovery/splice.h"
#include "services/methods/methods.h"

namespace spl::engine {
namespace {

using methods::HeadClasses;
using PolicyPtr = std::unique_ptr<RecoveryPolicy>;

// Measurements of the model: each is null where nothing was measured, and the classes unless the policy uses them.
struct Measured {
  const HeadClassMap* head_classes = nullptr;
  const RecoveryProfile* recovery = nullptr;
};

struct Maker {
  std::string_view name;
  PolicyPtr (*make)(const ModelConfig& config, const ReuseOptions& options, const Measured& model);
};

template <typename Policy>
PolicyPtr Plain(const ModelConfig& config, const ReuseOptions&, const Measured&) {
  return std::make_unique<Policy>(config);
}
template <typename Policy>
PolicyPtr WithOptions(const ModelConfig& config, const ReuseOptions& options, const Measured&) {
  return std::make_unique<Policy>(config, options);
}
template <typename Policy>
PolicyPtr WithClasses(const ModelConfig& config, const ReuseOptions& options, const Measured& model) {
  return std::make_unique<Policy>(config, *model.head_classes, options);
}
PolicyPtr CacheBlend(const ModelConfig& config, const ReuseOptions& options, const Measured&) {
  return std::make_unique<CacheBlendPolicy>(config, std::min(options.blend_share, options.max_recompute_fraction));
}
PolicyPtr Epic(const ModelConfig& config, const ReuseOptions& options, const Measured&) {
  return std::make_unique<EpicPolicy>(config, options.epic_tokens);
}
PolicyPtr SparseX(const ModelConfig& config, const ReuseOptions& options, const Measured& model) {
  return std::make_unique<SparseXProbePolicy>(config, options, model.recovery);
}
PolicyPtr Splice(const ModelConfig& config, const ReuseOptions& options, const Measured& model) {
  return std::make_unique<SplicePolicy>(config, *model.head_classes, options, model.recovery);
}
// Ours has computed rows before it chooses, and computes none behind; every other way is the paper's.
PolicyPtr SamKv(const ModelConfig& config, const ReuseOptions& options, const Measured& model) {
  if (options.choose == "recovered" && (options.recompute.empty() || options.recompute == "none"))
    return std::make_unique<SamKvPolicy>(config, options, model.recovery);
  return std::make_unique<SamKvPaperPolicy>(config, options, model.recovery);
}
PolicyPtr LoopServe(const ModelConfig& config, const ReuseOptions& options, const Measured& model) {
  return std::make_unique<LoopServePolicy>(config, options, model.head_classes);
}

constexpr Maker kMakers[] = {
    {"exact", Plain<ExactPolicy>},
    {"sparsex", SparseX},
    {"splice", Splice},
    {"splice+", Splice},
    {"redknot", WithClasses<RedKnotPolicy>},
    {"samkv", SamKv},
    {"naive", Plain<NaivePolicy>},
    {"epic", Epic},
    {"cacheblend", CacheBlend},
    {"loopserve", LoopServe},
    {"minference", WithOptions<MInferencePolicy>},
    {"a-shape", WithOptions<BandPolicy>},
    {"tri-shape", WithOptions<BandPolicy>},
};

bool HasHeadClasses(const ReuseOptions& options) {
  const methods::Policy* const traits = methods::FindPolicy(options.policy);
  if (traits == nullptr) return false;
  return traits->head_classes == HeadClasses::kAlways ||
         (traits->head_classes == HeadClasses::kOptional && options.head_classes);
}

absl::Status CheckFullAttention(std::string_view name, const ModelConfig& config) {
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    if (config.visibility(layer).rule != kernels::VisibilityRule::kFull)
      return Errorf(absl::StatusCode::kFailedPrecondition,
                    "reuse policy '{}' lists the tokens that a layer sees, and layer {} of this model has a sliding "
                    "window: use sparsex",
                    name, layer);
  }
  return absl::OkStatus();
}

}  // namespace

bool UsesHeadClasses(const ReuseOptions& options) { return !options.full_kv && HasHeadClasses(options); }

bool RunsWholeSpans(const ReuseOptions& options) {
  const methods::Policy* const traits = methods::FindPolicy(options.policy);
  return traits != nullptr && traits->runs_whole_spans;
}

std::string DefaultReusePolicy(const HeadClassMap* head_classes, int64_t num_tokens) {
  const HeadQuality quality = head_classes == nullptr ? HeadQuality() : head_classes->quality();
  const bool as_long = quality.longest == 0 || num_tokens <= quality.longest;
  return std::string(quality.within_contract() && as_long ? methods::kSplice : methods::kSparseX);
}

absl::StatusOr<std::unique_ptr<RecoveryPolicy>> MakeRecoveryPolicy(const ReuseOptions& options,
                                                                   const ModelConfig& config,
                                                                   const HeadClassMap* head_classes,
                                                                   const RecoveryProfile* recovery) {
  SPLICE_RETURN_IF_ERROR(ValidateReuseOptions(options, config));
  const std::string_view name = methods::ResolvePolicy(options.policy, false, "");
  const methods::Policy* const traits = methods::FindPolicy(name);
  const auto* const maker =
      std::find_if(std::begin(kMakers), std::end(kMakers), [&](auto& m) { return m.name == name; });
  if (traits == nullptr || maker == std::end(kMakers))
    return Errorf(absl::StatusCode::kUnimplemented, "reuse policy '{}' is not served by this build; it has: {}", name,
                  methods::PolicyNames());
  if (traits->needs_full_attention) SPLICE_RETURN_IF_ERROR(CheckFullAttention(name, config));
  if (!HasHeadClasses(options)) return maker->make(config, options, {.recovery = recovery});
  if (head_classes == nullptr)
    return Errorf(absl::StatusCode::kFailedPrecondition,
                  "reuse policy '{}' needs head classes, and the model has none: make them with splice profile, and "
                  "start the workers with --head-classes",
                  name);
  return maker->make(config, options, {.head_classes = head_classes, .recovery = recovery});
}

absl::Status CheckRecoveryPolicy(const ReuseOptions& options, const ModelConfig& config,
                                 const HeadClassMap* head_classes) {
  // KV that is left whole is decoded without the map, which only the prefill worker then has.
  if (options.full_kv && head_classes == nullptr) return ValidateReuseOptions(options, config);
  return MakeRecoveryPolicy(options, config, head_classes).status();
}

}  // namespace spl::engine
