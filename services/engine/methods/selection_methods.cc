#include "services/engine/methods/selection_methods.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "kernels/selection/sparcas/compact_keys.h"
#include "kernels/selection/sparcas/packed_keys.h"
#include "services/base/status.h"
#include "services/engine/selection/adaptive.h"
#include "services/engine/selection/baselines/adakv.h"
#include "services/engine/selection/baselines/h2o.h"
#include "services/engine/selection/baselines/quest.h"
#include "services/engine/selection/baselines/snapkv.h"
#include "services/engine/selection/baselines/streaming.h"
#include "services/engine/selection/cascade.h"
#include "services/engine/selection/dense.h"
#include "services/engine/selection/head_classes_selector.h"
#include "services/engine/selection/kept_tokens_selector.h"
#include "services/engine/selection/loopserve.h"
#include "services/engine/selection/sparcas.h"
#include "services/methods/methods.h"

namespace spl::engine {
namespace {

using methods::HeadClasses;
using Classes = std::shared_ptr<const StreamClasses>;
using SelectorPtr = std::unique_ptr<TokenSelector>;

// How a selector is made, and what is checked before. The options have no defaults left to fill in; `classes` is null
// unless the prompt has head classes.
struct Maker {
  std::string_view name;
  SelectorPtr (*make)(const ModelConfig& config, Classes classes, const DecodeOptions& options);
  absl::Status (*check)(const ModelConfig& config, const DecodeOptions& options) = nullptr;
  bool packs_keys = false;  // scores by packed keys where the backend serves them
};

template <typename Selector>
SelectorPtr WithOptions(const ModelConfig& config, Classes, const DecodeOptions& options) {
  return std::make_unique<Selector>(config, options);
}
template <typename Selector>
SelectorPtr WithClasses(const ModelConfig& config, Classes classes, const DecodeOptions& options) {
  return std::make_unique<Selector>(config, std::move(classes), options);
}
SelectorPtr Dense(const ModelConfig& config, Classes, const DecodeOptions&) {
  return std::make_unique<DenseSelector>(config);
}
SelectorPtr ByHeadClasses(const ModelConfig& config, Classes classes, const DecodeOptions&) {
  return std::make_unique<HeadClassesSelector>(config, std::move(classes));
}

absl::Status CheckDims(const ModelConfig& config, const DecodeOptions& o) {
  if (o.packed_keys) return absl::OkStatus();
  if (kernels::CompactKeys{config.head_dim, o.dims}.valid()) return absl::OkStatus();
  return InvalidArgument("decode_dims is {}, it must be a multiple of 4 that divides {}, at most {}", o.dims,
                         2 * config.head_dim, config.head_dim);
}

absl::Status CheckCandidates(const ModelConfig& config, const DecodeOptions& o) {
  if (o.candidates >= o.budget) return CheckDims(config, o);
  return InvalidArgument("decode_candidates is {}, of which decode_budget, {}, are chosen: at least as many",
                         o.candidates, o.budget);
}

absl::Status CheckPages(const ModelConfig&, const DecodeOptions& o) {
  if (o.budget % kernels::kBoundTokens == 0) return absl::OkStatus();
  return InvalidArgument("decode_budget is {}, quest takes pages of {} tokens: it must be a multiple of that", o.budget,
                         kernels::kBoundTokens);
}

absl::Status CheckWindow(const ModelConfig&, const DecodeOptions& o) {
  if (o.window < o.budget) return absl::OkStatus();
  return InvalidArgument(
      "decode_window is {}, {} keeps that many rows of the prompt: it must be less than decode_budget, {}", o.window,
      o.selector, o.budget);
}

absl::Status CheckHalves(const ModelConfig&, const DecodeOptions& o) {
  if (o.budget >= 2) return absl::OkStatus();
  return InvalidArgument("decode_budget is {}, h2o takes two halves of it: at least 2", o.budget);
}

constexpr Maker kMakers[] = {
    {"dense", Dense},
    {"head_classes", ByHeadClasses},
    {"sparcas", WithClasses<SparCasSelector>, CheckDims, /*packs_keys=*/true},
    {"adaptive", WithClasses<AdaptiveSelector>, CheckDims, /*packs_keys=*/true},
    {"loopserve", WithClasses<LoopServeSelector>},
    {"cascade", WithClasses<CascadeSelector>, CheckCandidates},
    {"quest", WithClasses<QuestSelector>, CheckPages},
    {"streaming", WithOptions<StreamingSelector>},
    {"snapkv", WithOptions<SnapKvSelector>, CheckWindow},
    {"adakv", WithOptions<AdaKvSelector>, CheckWindow},
    {"h2o", WithOptions<H2oSelector>, CheckHalves},
};

// The options with the selector's defaults.
DecodeOptions WithDefaults(DecodeOptions options, const methods::Selector& traits, const Maker& maker) {
  options.selector = traits.name;
  if (options.budget < 0) options.budget = traits.budget;
  if (options.window < 0) options.window = traits.window;
  if (options.recent < 0) options.recent = traits.recent;
  if (options.candidates < 0)
    options.candidates = std::max(options.budget, std::min(4 * options.budget, kernels::kSelectBudgetMax));
  options.packed_keys = options.packed_keys && maker.packs_keys;
  if (options.dims < 0) options.dims = options.packed_keys ? kernels::kPackedDims : kCompactDims;
  return options;
}

// Whether some head may attend to less than it could. By the model alone: whatever classes a sequence has, and whatever
// heads are restored later, the selector stays of one kind, and so do its compact pages.
bool LeavesOutAnything(const DecodeOptions& options, const ModelConfig& config) {
  for (int32_t layer = options.dense_layers; layer < config.num_layers; ++layer) {
    if (config.visibility(layer).rule == kernels::VisibilityRule::kFull) return true;
  }
  return false;
}

absl::Status CheckClasses(const methods::Selector& selector, bool has_classes) {
  if (selector.head_classes == HeadClasses::kNever && has_classes)
    return InvalidArgument(
        "decode selector '{}' needs all of the KV, but behind this reuse policy local heads only keep their window: "
        "set full_kv, or leave the selector out",
        selector.name);
  if (selector.head_classes == HeadClasses::kAlways && !has_classes)
    return InvalidArgument(
        "decode selector '{}' needs a prompt computed with head classes: reuse policy redknot, splice or splice+, "
        "without full_kv",
        selector.name);
  return absl::OkStatus();
}

// Behind tokens that were left out; null: a step attends to everything that is kept. So does `adaptive`, whose costs
// say nothing of lists.
absl::StatusOr<SelectorPtr> MakeInner(const DecodeOptions& options, const ModelConfig& config) {
  SPLICE_ASSIGN_OR_RETURN(auto inner, MakeTokenSelector(options, config, nullptr));
  if (inner->outer() != nullptr)
    return Errorf(absl::StatusCode::kUnimplemented,
                  "decode selector '{}' chooses among all tokens of a prompt, and this reuse policy left some out: "
                  "choose sparcas or loopserve",
                  inner->name());
  if (inner->name() == methods::kDense || inner->adaptive() != nullptr) inner.reset();
  return inner;
}

}  // namespace

DecodeOptions WithKeys(DecodeOptions options, const Model& model) {
  const ModelConfig& config = model.config();
  const auto fills_a_tile = [](int32_t tokens) { return tokens < 0 || tokens >= kernels::kPackedRecentMin; };
  const bool served = options.dims < 0 && fills_a_tile(options.recent) && fills_a_tile(options.budget);
  options.packed_keys =
      served && (options.packed_keys ||
                 model.backend().PrefersPackedKeys({config.num_qo_heads, config.num_kv_heads, config.head_dim, 1},
                                                   config.dtype, config.max_positions));
  return options;
}

absl::StatusOr<std::unique_ptr<TokenSelector>> MakeTokenSelector(const DecodeOptions& wanted, const ModelConfig& config,
                                                                 std::shared_ptr<const StreamClasses> classes) {
  SPLICE_RETURN_IF_ERROR(ValidateDecodeOptions(wanted, config));
  const bool has_classes = classes != nullptr;
  const std::string_view name = methods::ResolveSelector(wanted.selector, has_classes);
  const methods::Selector* const traits = methods::FindSelector(name);
  const auto find = [](std::string_view n) {
    return std::find_if(std::begin(kMakers), std::end(kMakers), [&](auto& m) { return m.name == n; });
  };
  const Maker* maker = find(name);
  if (traits == nullptr || maker == std::end(kMakers))
    return Errorf(absl::StatusCode::kUnimplemented, "decode selector '{}' is not served by this build; it has: {}",
                  name, methods::SelectorNames());
  SPLICE_RETURN_IF_ERROR(CheckClasses(*traits, has_classes));
  const DecodeOptions options = WithDefaults(wanted, *traits, *maker);
  if (maker->check != nullptr) SPLICE_RETURN_IF_ERROR(maker->check(config, options));
  if (traits->chooses && !LeavesOutAnything(options, config))
    maker = find(methods::ResolveSelector(methods::kAuto, has_classes));
  return maker->make(config, std::move(classes), options);
}

absl::StatusOr<std::unique_ptr<TokenSelector>> MakeSelectorFor(const SequenceKv& kv, const DecodeOptions& options,
                                                               const Model& model) {
  if (kv.kept() == nullptr) return MakeTokenSelector(WithKeys(options, model), model.config(), kv.classes());
  SPLICE_ASSIGN_OR_RETURN(auto inner, MakeInner(options, model.config()));
  return std::make_unique<KeptTokensSelector>(model.config(), kv.kept(), std::move(inner));
}

absl::StatusOr<std::unique_ptr<TokenSelector>> MakeSelectorBehind(std::string_view policy, int64_t num_tokens,
                                                                  const DecodeOptions& options, const Model& model,
                                                                  std::shared_ptr<const StreamClasses> classes) {
  const ModelConfig& config = model.config();
  const methods::Policy* const traits = methods::FindPolicy(policy);
  if (traits == nullptr || !traits->leaves_out_tokens)
    return MakeTokenSelector(WithKeys(options, model), config, std::move(classes));
  const PositionRange everything{0, static_cast<int32_t>(num_tokens)};
  SPLICE_ASSIGN_OR_RETURN(auto inner, MakeInner(options, config));
  KeptTokens kept{everything.end, std::vector<PositionRanges>(static_cast<size_t>(config.num_layers), {everything})};
  return std::make_unique<KeptTokensSelector>(config, std::make_shared<const KeptTokens>(std::move(kept)),
                                              std::move(inner));
}

}  // namespace spl::engine
