#include "services/engine/selection/token_selector.h"

#include <algorithm>
#include <utility>

#include "kernels/selection/candidates.h"
#include "kernels/selection/compact_keys.h"
#include "kernels/selection/page_bound_scores.h"
#include "kernels/selection/query_window.h"
#include "kernels/selection/select_tokens.h"
#include "services/base/check_range.h"
#include "services/base/status.h"
#include "services/engine/selection/adakv.h"
#include "services/engine/selection/dense.h"
#include "services/engine/selection/h2o.h"
#include "services/engine/selection/head_classes_selector.h"
#include "services/engine/selection/loopserve.h"
#include "services/engine/selection/quest.h"
#include "services/engine/selection/snapkv.h"
#include "services/engine/selection/sparcas.h"
#include "services/engine/selection/streaming.h"

namespace spl::engine {
namespace {

// What a method's paper or code has (algorithms.md sections 4 and 7).
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

}  // namespace

std::optional<CompactPages::Needs> CompactNeedsOf(const TokenSelector& selector, const Model& model,
                                                  int64_t num_tokens) {
  const ModelConfig& config = model.config();
  const ScoringPlan plan = selector.scoring();
  CompactPages::Needs needs;
  switch (plan.scoring) {
    case TokenScoring::kNone:
      break;
    case TokenScoring::kCompactKeys:
      needs.page_tokens = kernels::CompactKeys{config.head_dim, plan.num_dims}.page_tokens();
      needs.num_dims = plan.num_dims;
      break;
    case TokenScoring::kPageBounds:
      needs.page_tokens = kernels::kBoundPageTokens;
      break;
    case TokenScoring::kQueryWindow:
      needs.fixed_pages = kernels::QueryWindow{.head_dim = config.head_dim,
                                               .group = config.num_qo_heads / config.num_kv_heads,
                                               .window = plan.window,
                                               .budget = plan.budget,
                                               .query_dtype = model.backend().activation_dtype(config.dtype),
                                               .page_bytes = model.page_bytes()}
                              .num_pages();
      break;
  }
  bool lists = false;
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    for (int32_t h = 0; h < config.num_kv_heads; ++h) {
      needs.streams.push_back(selector.Chooses(layer, h));
      needs.lists.push_back(selector.Lists(layer, h));
      lists |= needs.lists.back();
    }
  }
  if (lists) {
    const int64_t most = selector.most_listed(num_tokens);
    needs.list_pages = kernels::ListPages(most, model.page_bytes());
    needs.left_out = std::max<int64_t>(plan.first_fresh - most, 0);
  }
  if (plan.scoring == TokenScoring::kNone && !lists) return std::nullopt;
  return needs;
}

absl::StatusOr<std::unique_ptr<CompactPages>> MakeCompactPages(const TokenSelector& selector, const Model& model,
                                                               PagePool& pool, int64_t num_tokens) {
  const ModelConfig& config = model.config();
  auto needs = CompactNeedsOf(selector, model, num_tokens);
  if (!needs.has_value()) return nullptr;
  return CompactPages::Create(pool, {config.num_layers, config.num_kv_heads}, *std::move(needs), model.backends());
}

absl::Status FitCompactPages(const TokenSelector& selector, const Model& model, int64_t num_tokens,
                             std::unique_ptr<CompactPages>& pages) {
  auto needs = CompactNeedsOf(selector, model, num_tokens);
  if (needs.has_value()) return pages->Become(*std::move(needs), num_tokens + 1);
  pages.reset();
  return absl::OkStatus();
}

std::vector<std::string> TokenSelectorNames() {
  return {"dense", "head_classes", "sparcas", "loopserve", "quest", "streaming", "snapkv", "adakv", "h2o"};
}

absl::Status ValidateDecodeOptions(const DecodeOptions& o, const ModelConfig& config) {
  const int32_t most = std::min(config.max_positions, kernels::kSelectBudgetMax);
  // -1 is what is not set; what a request sets is never negative.
  if (o.budget != -1) SPLICE_RETURN_IF_ERROR(CheckRange("decode_budget", o.budget, 1, most));
  if (o.recent != -1) SPLICE_RETURN_IF_ERROR(CheckRange("decode_recent", o.recent, 1, most));
  SPLICE_RETURN_IF_ERROR(CheckRange("decode_dense_layers", o.dense_layers, 0, config.num_layers));
  SPLICE_RETURN_IF_ERROR(CheckRange("decode_refresh_interval", o.refresh_interval, 1, 1 << 20));
  if (o.window != -1) SPLICE_RETURN_IF_ERROR(CheckRange("decode_window", o.window, 1, kernels::kQueryWindowMax));
  SPLICE_RETURN_IF_ERROR(CheckRange("decode_sinks", o.sinks, 0, most));
  if (o.selector == "sparcas" && !kernels::CompactKeys{config.head_dim, o.dims}.valid())
    return InvalidArgument("decode_dims is {}, it must be a multiple of 4 that divides {}, at most {}", o.dims,
                           2 * config.head_dim, config.head_dim);
  if (o.selector == "quest" && o.budget != -1 && o.budget % kernels::kBoundTokens != 0)
    return InvalidArgument("decode_budget is {}, quest takes pages of {} tokens: it must be a multiple of that",
                           o.budget, kernels::kBoundTokens);
  return absl::OkStatus();
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

}  // namespace spl::engine
