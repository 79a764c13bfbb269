#include "services/engine/methods/selection_methods.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "services/base/status.h"
#include "services/engine/selection/baselines/adakv.h"
#include "services/engine/selection/baselines/h2o.h"
#include "services/engine/selection/baselines/quest.h"
#include "services/engine/selection/baselines/snapkv.h"
#include "services/engine/selection/baselines/streaming.h"
#include "services/engine/selection/dense.h"
#include "services/engine/selection/head_classes_selector.h"
#include "services/engine/selection/kept_tokens_selector.h"
#include "services/engine/selection/loopserve.h"
#include "services/engine/selection/sparcas.h"

namespace spl::engine {
namespace {

// Fills in what a method's paper or code has (docs/methods/sparcas.md and docs/methods/baselines.md).
void FillDefaults(DecodeOptions& options) {
  const std::string& name = options.selector;
  if (options.budget < 0) options.budget = name == "sparcas" || name == "quest" || name == "snapkv" ? 2048 : 1024;
  if (options.window < 0) options.window = name == "snapkv" || name == "adakv" ? 32 : 16;
  if (options.recent < 0) options.recent = options.selector == "sparcas" ? 64 : 16;
}

// Whether some head may attend to less than it could. By the model alone: whatever classes a sequence has, and whatever
// heads are restored later, the selector stays of one kind, and so do its compact pages.
bool LeavesOutAnything(const DecodeOptions& options, const ModelConfig& config) {
  for (int32_t layer = options.dense_layers; layer < config.num_layers; ++layer) {
    if (config.visibility(layer).rule == kernels::VisibilityRule::kFull) return true;
  }
  return false;
}

// Behind tokens that were left out; null: a step attends to everything that is kept.
absl::StatusOr<std::unique_ptr<TokenSelector>> MakeInner(DecodeOptions options, const ModelConfig& config) {
  if (options.selector.empty() || options.selector == "auto") options.selector = "dense";
  SPLICE_ASSIGN_OR_RETURN(auto inner, MakeTokenSelector(options, config, nullptr));
  if (inner->name() == "dense") inner.reset();
  return inner;
}

}  // namespace

std::vector<std::string> TokenSelectorNames() {
  return {"dense", "head_classes", "sparcas", "loopserve", "quest", "streaming", "snapkv", "adakv", "h2o"};
}

absl::StatusOr<std::unique_ptr<TokenSelector>> MakeTokenSelector(const DecodeOptions& wanted, const ModelConfig& config,
                                                                 std::shared_ptr<const StreamClasses> classes) {
  DecodeOptions options = wanted;
  if (options.selector.empty() || options.selector == "auto")
    options.selector = classes == nullptr ? "dense" : "head_classes";
  SPLICE_RETURN_IF_ERROR(ValidateDecodeOptions(options, config));
  FillDefaults(options);
  const std::string& name = options.selector;
  const bool leaves_out = LeavesOutAnything(options, config);
  if (!leaves_out && (name == "sparcas" || name == "loopserve" || name == "quest"))
    options.selector = classes == nullptr ? "dense" : "head_classes";
  if (name == "sparcas") return std::make_unique<SparCasSelector>(config, std::move(classes), options);
  if (name == "loopserve") return std::make_unique<LoopServeSelector>(config, std::move(classes), options);
  if (name == "quest") return std::make_unique<QuestSelector>(config, std::move(classes), options);
  const bool by_window = name == "snapkv" || name == "adakv", of_prompt = by_window || name == "h2o";
  if (by_window && options.window >= options.budget)
    return InvalidArgument(
        "decode_window is {}, {} keeps that many rows of the prompt: it must be less than decode_budget, {}",
        options.window, name, options.budget);
  if (name == "h2o" && options.budget < 2)
    return InvalidArgument("decode_budget is {}, h2o takes two halves of it: at least 2", options.budget);
  if (name == "dense" || name == "streaming" || of_prompt) {
    if (classes != nullptr)
      return InvalidArgument(
          "decode selector '{}' needs all of the KV, but behind this reuse policy local heads only keep their "
          "window: set full_kv, or leave the selector out",
          name);
    if (!leaves_out) return std::make_unique<DenseSelector>(config);
    if (name == "streaming") return std::make_unique<StreamingSelector>(config, options);
    if (name == "snapkv") return std::make_unique<SnapKvSelector>(config, options);
    if (name == "adakv") return std::make_unique<AdaKvSelector>(config, options);
    if (name == "h2o") return std::make_unique<H2oSelector>(config, options);
    return std::make_unique<DenseSelector>(config);
  }
  if (name == "head_classes") {
    if (classes == nullptr)
      return InvalidArgument(
          "decode selector 'head_classes' needs a prompt computed with head classes: reuse policy redknot, splice or "
          "splice+, without full_kv");
    return std::make_unique<HeadClassesSelector>(config, std::move(classes));
  }
  return Errorf(absl::StatusCode::kUnimplemented, "decode selector '{}' is not served by this build; it has: {}", name,
                fmt::join(TokenSelectorNames(), ", "));
}

absl::StatusOr<std::unique_ptr<TokenSelector>> MakeSelectorFor(const SequenceKv& kv, const DecodeOptions& options,
                                                               const Model& model) {
  if (kv.kept() == nullptr) return MakeTokenSelector(options, model.config(), kv.classes());
  SPLICE_ASSIGN_OR_RETURN(auto inner, MakeInner(options, model.config()));
  return std::make_unique<KeptTokensSelector>(model.config(), kv.kept(), std::move(inner));
}

absl::StatusOr<std::unique_ptr<TokenSelector>> MakeSelectorBehind(std::string_view policy, int64_t num_tokens,
                                                                  const DecodeOptions& options, const Model& model,
                                                                  std::shared_ptr<const StreamClasses> classes) {
  const ModelConfig& config = model.config();
  if (policy != "samkv") return MakeTokenSelector(options, config, std::move(classes));
  const PositionRange everything{0, static_cast<int32_t>(num_tokens)};
  SPLICE_ASSIGN_OR_RETURN(auto inner, MakeInner(options, config));
  KeptTokens kept{everything.end, std::vector<PositionRanges>(static_cast<size_t>(config.num_layers), {everything})};
  return std::make_unique<KeptTokensSelector>(config, std::make_shared<const KeptTokens>(std::move(kept)),
                                              std::move(inner));
}

}  // namespace spl::engine
