#include "services/engine/selection/token_selector.h"

#include <utility>

#include "kernels/selection/compact_keys.h"
#include "kernels/selection/page_bound_scores.h"
#include "kernels/selection/select_tokens.h"
#include "services/base/status.h"
#include "services/engine/selection/dense.h"
#include "services/engine/selection/head_classes_selector.h"
#include "services/engine/selection/quest.h"
#include "services/engine/selection/sparcas.h"
#include "services/engine/selection/streaming.h"

namespace spl::engine {
namespace {

// What a method's paper or code has (algorithms.md sections 4 and 7).
void FillDefaults(DecodeOptions& options) {
  if (options.budget < 0) options.budget = options.selector == "streaming" ? 1024 : 2048;
  if (options.recent < 0) options.recent = options.selector == "quest" ? kernels::kBoundTokens : 64;
}

}  // namespace

int32_t ScoringPlan::compact_page_tokens(int32_t head_dim) const {
  switch (scoring) {
    case TokenScoring::kCompactKeys:
      return kernels::CompactKeys{head_dim, num_dims}.page_tokens();
    case TokenScoring::kPageBounds:
      return kernels::kBoundPageTokens;
    case TokenScoring::kNone:
      return 0;
  }
  return 0;
}

std::optional<CompactPages::Needs> CompactNeedsOf(const TokenSelector& selector, const ModelConfig& config) {
  const ScoringPlan plan = selector.scoring();
  if (plan.scoring == TokenScoring::kNone) return std::nullopt;
  CompactPages::Needs needs{.page_tokens = plan.compact_page_tokens(config.head_dim), .num_dims = plan.num_dims};
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    for (int32_t h = 0; h < config.num_kv_heads; ++h) needs.streams.push_back(selector.Chooses(layer, h));
  }
  return needs;
}

absl::StatusOr<std::unique_ptr<CompactPages>> MakeCompactPages(const TokenSelector& selector, const Model& model,
                                                               PagePool& pool) {
  const ModelConfig& config = model.config();
  auto needs = CompactNeedsOf(selector, config);
  if (!needs.has_value()) return nullptr;
  return CompactPages::Create(pool, {config.num_layers, config.num_kv_heads}, *std::move(needs), model.backends());
}

std::vector<std::string> TokenSelectorNames() { return {"dense", "head_classes", "sparcas", "quest", "streaming"}; }

absl::Status ValidateDecodeOptions(const DecodeOptions& o, const ModelConfig& config) {
  const auto integer = [](const char* field, int64_t value, int64_t low, int64_t high) -> absl::Status {
    if (value >= low && value <= high) return absl::OkStatus();
    return InvalidArgument("{} is {}, it must be {} to {}", field, value, low, high);
  };
  const int32_t most = std::min(config.max_positions, kernels::kSelectBudgetMax);
  // -1 is what is not set; what a request sets is never negative.
  if (o.budget != -1) SPLICE_RETURN_IF_ERROR(integer("decode_budget", o.budget, 1, most));
  if (o.recent != -1) SPLICE_RETURN_IF_ERROR(integer("decode_recent", o.recent, 1, most));
  SPLICE_RETURN_IF_ERROR(integer("decode_dense_layers", o.dense_layers, 0, config.num_layers));
  SPLICE_RETURN_IF_ERROR(integer("decode_refresh_interval", o.refresh_interval, 1, 1 << 20));
  SPLICE_RETURN_IF_ERROR(integer("decode_sinks", o.sinks, 0, most));
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
  if (name == "sparcas") return std::make_unique<SparCasSelector>(config, std::move(classes), options);
  if (name == "quest") return std::make_unique<QuestSelector>(config, std::move(classes), options);
  if (name == "dense" || name == "streaming") {
    if (classes != nullptr)
      return InvalidArgument(
          "decode selector '{}' needs all of the KV, but behind this reuse policy local heads only keep their "
          "window: set full_kv, or leave the selector out",
          name);
    if (name == "streaming") return std::make_unique<StreamingSelector>(config, options);
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
