#include "services/engine/selection/token_selector.h"

#include <algorithm>
#include <utility>

#include "kernels/selection/candidates.h"
#include "kernels/selection/h2o/heavy_hitters.h"
#include "kernels/selection/quest/page_bound_scores.h"
#include "kernels/selection/sparcas/compact_keys.h"
#include "kernels/selection/sparcas/packed_keys.h"

namespace spl::engine {

kernels::QueryWindow QueryWindowOf(const ScoringPlan& plan, const Model& model) {
  const ModelConfig& config = model.config();
  return {.head_dim = config.head_dim,
          .group = config.num_qo_heads / config.num_kv_heads,
          .window = plan.window,
          .budget = plan.budget,
          .query_dtype = model.backend().activation_dtype(config.dtype),
          .page_bytes = model.page_bytes()};
}

std::optional<CompactPages::Needs> CompactNeedsOf(const TokenSelector& selector, const Model& model,
                                                  int64_t num_tokens) {
  const ModelConfig& config = model.config();
  const ScoringPlan plan = selector.scoring();
  CompactPages::Needs needs;
  switch (plan.scoring) {
    case TokenScoring::kNone:
      break;
    case TokenScoring::kCompactKeys:
      needs.page_tokens = kernels::CompactKeys{config.head_dim, plan.num_dims, model.kv_dtype()}.page_tokens();
      needs.num_dims = plan.num_dims;
      break;
    case TokenScoring::kPackedKeys:
      needs.page_tokens = kernels::PackedKeys{static_cast<int64_t>(model.page_bytes())}.page_tokens();
      needs.num_dims = plan.num_dims;
      break;
    case TokenScoring::kPageBounds:
      needs.page_tokens = kernels::BoundPageTokens(model.kv_dtype());
      break;
    case TokenScoring::kQueryWindow:
      needs.fixed_pages = QueryWindowOf(plan, model).num_pages();
      break;
    case TokenScoring::kHeavyHitters:
      needs.fixed_pages = kernels::HeavyHitterPages{plan.budget, model.page_bytes()}.num_pages();
      break;
  }
  if (const OuterChoice* const outer = selector.outer(); outer != nullptr) {
    // Keys of what the outer choice keeps, behind its queries and its list.
    const kernels::CompactKeys keys{config.head_dim, plan.num_dims, model.kv_dtype()};
    needs.page_tokens = 0;
    needs.fixed_pages = QueryWindowOf(outer->scoring, model).num_pages() +
                        keys.num_pages(static_cast<int32_t>(outer->scoring.list_tokens()));
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
  if (needs.has_value() && needs->num_dims == pages->needs().num_dims)
    return pages->Become(*std::move(needs), num_tokens + 1);
  pages.reset();
  return absl::OkStatus();
}

}  // namespace spl::engine
