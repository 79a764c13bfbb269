#include "services/engine/methods/recovery_methods.h"

#include <fmt/format.h>

#include <algorithm>

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
#include "services/engine/recovery/splice.h"

namespace spl::engine {

bool UsesHeadClasses(const ReuseOptions& options) {
  if (options.full_kv) return false;
  if (options.policy == "loopserve") return options.head_classes;
  return options.policy == "redknot" || options.policy == "splice" || options.policy == "splice+";
}

bool RunsWholeSpans(const ReuseOptions& options) {
  return options.policy == "loopserve" || options.policy == "minference";
}

std::vector<std::string> RecoveryPolicyNames() {
  return {"exact", "sparsex",    "splice",    "splice+",    "redknot", "samkv",    "naive",
          "epic",  "cacheblend", "loopserve", "minference", "a-shape", "tri-shape"};
}

std::string DefaultReusePolicy(const HeadClassMap* head_classes) {
  return head_classes != nullptr && head_classes->quality().within_contract() ? "splice" : "sparsex";
}

absl::StatusOr<std::unique_ptr<RecoveryPolicy>> MakeRecoveryPolicy(const ReuseOptions& options,
                                                                   const ModelConfig& config,
                                                                   const HeadClassMap* head_classes) {
  SPLICE_RETURN_IF_ERROR(ValidateReuseOptions(options, config));
  const std::string& name = options.policy;
  if (name.empty() || name == "auto" || name == "exact") return std::make_unique<ExactPolicy>(config);
  if (name == "sparsex") return std::make_unique<SparseXPolicy>(config, options);
  if (name == "naive") return std::make_unique<NaivePolicy>(config);
  if (name == "cacheblend")
    return std::make_unique<CacheBlendPolicy>(config, std::min(options.blend_share, options.max_recompute_fraction));
  if (name == "epic") return std::make_unique<EpicPolicy>(config, options.epic_tokens);
  if (name == "samkv") {
    for (int32_t layer = 0; layer < config.num_layers; ++layer) {
      if (config.visibility(layer).rule != kernels::VisibilityRule::kFull)
        return Errorf(
            absl::StatusCode::kFailedPrecondition,
            "reuse policy 'samkv' lists the tokens that a layer sees, and layer {} of this model has a sliding "
            "window: use sparsex",
            layer);
    }
    // Ours has computed rows before it chooses, and computes none behind.
    if (options.choose == "recovered" && (options.recompute.empty() || options.recompute == "none"))
      return std::make_unique<SamKvPolicy>(config, options);
    return std::make_unique<SamKvPaperPolicy>(config, options);
  }
  if (name == "minference") return std::make_unique<MInferencePolicy>(config, options);
  if (name == "a-shape" || name == "tri-shape") return std::make_unique<BandPolicy>(config, options);
  if (name == "loopserve" && !options.head_classes) return std::make_unique<LoopServePolicy>(config, options, nullptr);
  if (name == "redknot" || name == "splice" || name == "splice+" || name == "loopserve") {
    if (head_classes == nullptr)
      return Errorf(absl::StatusCode::kFailedPrecondition,
                    "reuse policy '{}' needs head classes, and the model has none: make them with splice profile, and "
                    "start the workers with --head-classes",
                    name);
    if (name == "loopserve") return std::make_unique<LoopServePolicy>(config, options, head_classes);
    if (name == "redknot") return std::make_unique<RedKnotPolicy>(config, *head_classes, options);
    return std::make_unique<SplicePolicy>(config, *head_classes, options);
  }
  return Errorf(absl::StatusCode::kUnimplemented, "reuse policy '{}' is not served by this build; it has: {}", name,
                fmt::join(RecoveryPolicyNames(), ", "));
}

absl::Status CheckRecoveryPolicy(const ReuseOptions& options, const ModelConfig& config,
                                 const HeadClassMap* head_classes) {
  // KV that is left whole is decoded without the map, which only the prefill worker then has.
  if (options.full_kv && head_classes == nullptr) return ValidateReuseOptions(options, config);
  return MakeRecoveryPolicy(options, config, head_classes).status();
}

}  // namespace spl::engine
