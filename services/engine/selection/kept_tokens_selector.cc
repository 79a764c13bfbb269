#include "services/engine/selection/kept_tokens_selector.h"

#include <algorithm>
#include <utility>

#include "services/base/check.h"
#include "services/base/status.h"

namespace spl::engine {
namespace {

int64_t LongestOf(const KeptTokens& kept) {
  int64_t longest = 0;
  for (const PositionRanges& layer : kept.layers) longest = std::max(longest, CountOf(layer));
  return longest;
}

}  // namespace

KeptTokensSelector::KeptTokensSelector(const ModelConfig& config, std::shared_ptr<const KeptTokens> kept)
    : ChoosingSelector(config, nullptr, {.scoring = TokenScoring::kKeptTokens, .budget = 1}),
      kept_(std::move(kept)),
      num_kv_heads_(config.num_kv_heads),
      longest_(LongestOf(*kept_)),
      kv_len_(kept_->num_tokens) {
  SPLICE_CHECK(static_cast<int32_t>(kept_->layers.size()) == config.num_layers &&
                   static_cast<int32_t>(choosing_layers().size()) == config.num_layers,
               "a list for each layer of a model without windows");
}

void KeptTokensSelector::BeginStep(int64_t kv_len) {
  kv_len_ = kv_len;
  SetStep(/*scores=*/true, /*chosen=*/true);
  for (const int32_t number : choosing_layers()) layer(number).selects = layer(number).records = true;
}

ScoringPlan KeptTokensSelector::scoring() const {
  ScoringPlan now = plan();
  now.budget = static_cast<int32_t>(longest_ + std::max<int64_t>(kv_len_ - kept_->num_tokens, 1));
  return now;
}

KeptPositions KeptTokensSelector::lists(int64_t num_tokens) const {
  KeptPositions lists;
  for (const PositionRanges& layer : kept_->layers) {
    std::vector<int32_t> list;
    list.reserve(static_cast<size_t>(CountOf(layer) + num_tokens - kept_->num_tokens));
    for (const PositionRange& range : layer) {
      for (int32_t p = range.begin; p < range.end; ++p) list.push_back(p);
    }
    for (int64_t p = kept_->num_tokens; p < num_tokens; ++p) list.push_back(static_cast<int32_t>(p));
    lists.insert(lists.end(), static_cast<size_t>(num_kv_heads_), list);
  }
  return lists;
}

absl::StatusOr<std::unique_ptr<TokenSelector>> MakeSelectorFor(const SequenceKv& kv, const DecodeOptions& options,
                                                               const Model& model) {
  if (kv.kept() == nullptr) return MakeTokenSelector(options, model.config(), kv.classes());
  SPLICE_RETURN_IF_ERROR(CheckSelectorBehind("samkv", options, model));
  return std::make_unique<KeptTokensSelector>(model.config(), kv.kept());
}

absl::Status CheckSelectorBehind(std::string_view policy, const DecodeOptions& options, const Model&) {
  if (policy != "samkv") return absl::OkStatus();
  const std::string& name = options.selector;
  if (!name.empty() && name != "auto" && name != "dense")
    return InvalidArgument(
        "decode is '{}': behind reuse policy samkv a layer only has the tokens that it keeps, and this build lets no "
        "selector choose among them: leave decode out",
        name);
  return absl::OkStatus();
}

}  // namespace spl::engine
