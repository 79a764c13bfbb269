// A decode method: decides which resident tokens a query attends to.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/common/token_selection.h"
#include "kernels/common/visibility.h"
#include "kernels/selection/loopserve/query_window.h"
#include "services/engine/cache/compact_pages.h"
#include "services/engine/cache/stream_classes.h"
#include "services/engine/model/model.h"
#include "services/engine/selection/decode_options.h"
#include "services/engine/selection/kept_positions.h"

namespace spl::engine {

// How the tokens among which a step chooses are scored.
enum class TokenScoring : uint8_t {
  kNone,          // none are chosen: the host knows what a head sees, or it is listed before the first step
  kCompactKeys,   // SparCas: some dimensions of every key (kernels/selection/sparcas/select_tokens.h)
  kPackedKeys,    // SparCas: the same in 4 bits, choice and attention in one
                  // (kernels/selection/sparcas/sparse_attention.h)
  kPageBounds,    // Quest: bounds of 16 keys at a time (kernels/selection/quest/page_bound_scores.h)
  kQueryWindow,   // LoopServe: attention of the last queries (kernels/selection/loopserve/query_window.h)
  kHeavyHitters,  // H2O: attention received so far (kernels/selection/h2o/heavy_hitters.h)
};

// Operations that a selector needs. Only the budget and the length of its lists may change between the steps of a
// sequence. One step's operations serve all sequences that score the same way (SharesStep).
struct ScoringPlan {
  TokenScoring scoring = TokenScoring::kNone;
  int32_t num_dims = 0;     // kCompactKeys, kPackedKeys
  int32_t window = 0;       // kQueryWindow
  int32_t first_layer = 0;  // layers below it do not choose
  int32_t budget = 0;
  int32_t recent = 1;
  bool outer = false;  // belongs to an OuterChoice
  // For sequences with lists (kernels/selection/candidates.h): the first position of what is fresh, and the length of
  // the longest list in this step that does not come from a choice; 0: there is none.
  int32_t first_fresh = 0;
  int64_t listed_tokens = 0;

  // True if the same operations serve both. Budgets and first layers may differ: each sequence says in each layer
  // whether it selects there.
  bool SharesStep(const ScoringPlan& other) const {
    return outer == other.outer && scoring == other.scoring && num_dims == other.num_dims && window == other.window;
  }
  // Some order of the ways to score, with outer choices first.
  bool OrdersBefore(const ScoringPlan& other) const {
    return std::tie(other.outer, scoring, num_dims, window) <
           std::tie(outer, other.scoring, other.num_dims, other.window);
  }
  // Most positions in a list.
  int64_t list_tokens() const {
    if (scoring == TokenScoring::kNone) return listed_tokens;
    // Besides the budget: what joins until the next choice, or in this step.
    const int64_t joined = scoring == TokenScoring::kHeavyHitters ? 1 : std::max(window - 1, 0);
    return std::max(budget + joined, listed_tokens);
  }
};

// A choice in front of a step's own, by the last queries: what it keeps are the candidates of the step's choice, by
// compact keys (selection/cascade.h).
struct OuterChoice {
  ScoringPlan scoring;                              // kQueryWindow
  std::span<const kernels::LayerSelection> layers;  // [num_layers]: what each layer does in this step
};

class AdaptiveSelector;
class PromptSelector;

// One object per sequence. Used by the engine thread only, except for Select: with several ranks, the thread of each
// rank calls it for its own heads at the same time. A selector decides; it runs no kernels.
class TokenSelector {
 public:
  virtual ~TokenSelector() = default;
  virtual std::string_view name() const = 0;
  // Whether the next step attends to everything that the model lets it see.
  virtual bool is_exact() const = 0;
  // Called once per step, before everything else. The step writes position kv_len - 1.
  virtual void BeginStep(int64_t /*kv_len*/) {}
  // Returns what the query of `kv_head` in `layer` attends to in this step. kSelected: the tokens that this step
  // chooses; kElsewhere: the same, where the choice attends to them. Spans stay valid until the next step.
  virtual kernels::HeadVisibility Select(int32_t layer, int32_t kv_head) = 0;
  // Selectors of one model with equal keys select the same for every layer and head, so that a recorded step may be
  // replayed.
  virtual uint64_t plan_key() const = 0;
  // False: other sequences hardly ever select the same, so that it does not pay to record a step for this plan.
  virtual bool shares_plan() const { return true; }

  virtual ScoringPlan scoring() const { return {}; }
  // The choice in front of that of scoring(); null: that one chooses among everything that streams hold.
  virtual const OuterChoice* outer() const { return nullptr; }
  // Positions that streams may choose from besides what is fresh, if they are known without a choice. The code that
  // begins decoding writes them to the compact pages (BeginLists). Empty: there are no lists.
  virtual KeptPositions lists() const { return {}; }
  // Streams that have lists, and the most positions in a list if decoding begins behind `num_tokens` positions.
  virtual bool Lists(int32_t /*layer*/, int32_t /*kv_head*/) const { return false; }
  virtual int64_t most_listed(int64_t /*num_tokens*/) const { return 0; }
  // This selector, if it chooses by the prompt's attention (runtime/prompt_replay.h); null: it does not.
  virtual PromptSelector* of_prompt() { return nullptr; }
  // This selector, if its steps may or may not choose (selection/adaptive.h); null: that is not open.
  virtual AdaptiveSelector* adaptive() { return nullptr; }
  // True if this stream ever chooses tokens by scores; it then has compact pages.
  virtual bool Chooses(int32_t /*layer*/, int32_t /*kv_head*/) const { return false; }
  // [num_layers]: what each layer does in this step; empty: no layer chooses.
  virtual std::span<const kernels::LayerSelection> layers() const { return {}; }
};

// Contents of the pages of a stream that chooses by the last queries.
kernels::QueryWindow QueryWindowOf(const ScoringPlan& plan, const Model& model);
// Compact pages that a sequence with this selector needs if decoding begins behind `num_tokens` positions;
// std::nullopt: none.
std::optional<CompactPages::Needs> CompactNeedsOf(const TokenSelector& selector, const Model& model,
                                                  int64_t num_tokens);
// Makes these compact pages, without room for any positions yet. Errors are those of CompactPages::Create. Null: it
// needs none.
absl::StatusOr<std::unique_ptr<CompactPages>> MakeCompactPages(const TokenSelector& selector, const Model& model,
                                                               PagePool& pool, int64_t num_tokens);
// Turns the compact pages of another selector of the same method into those of this one, with room for the step behind
// `num_tokens` positions. `pages` becomes null if it needs none, or tables of dimensions of another size: those are to
// be made anew. Errors are those of CompactPages::Become.
absl::Status FitCompactPages(const TokenSelector& selector, const Model& model, int64_t num_tokens,
                             std::unique_ptr<CompactPages>& pages);

}  // namespace spl::engine
