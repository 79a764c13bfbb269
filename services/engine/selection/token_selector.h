// A decode method: which resident tokens a query attends to.
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
#include "services/engine/cache/compact_pages.h"
#include "services/engine/cache/stream_classes.h"
#include "services/engine/model/model.h"
#include "services/engine/selection/decode_options.h"
#include "services/engine/selection/kept_positions.h"

namespace spl::engine {

// How tokens get the scores by which a step chooses among them.
enum class TokenScoring : uint8_t {
  kNone,         // none are chosen: what a head sees is known to the host, or listed before the first step
  kCompactKeys,  // SparCas: some dimensions of every key (kernels/selection/sparcas/select_tokens.h)
  kPageBounds,   // Quest: bounds of 16 keys at a time (kernels/selection/quest/page_bound_scores.h)
  kQueryWindow,  // LoopServe: attention of the last queries (kernels/selection/loopserve/query_window.h)
};

// What a selector needs computed, the same for all steps of a sequence but for the budget and the length of its lists.
// Sequences that score the same way (SharesStep) are served by the same operations of a step.
struct ScoringPlan {
  TokenScoring scoring = TokenScoring::kNone;
  int32_t num_dims = 0;     // kCompactKeys
  int32_t window = 0;       // kQueryWindow
  int32_t first_layer = 0;  // no layer below chooses
  int32_t budget = 0;
  int32_t recent = 1;
  // Of a sequence with lists (kernels/selection/candidates.h): where what is fresh begins, and the most positions of a
  // list of this step that is no choice; 0: it has none.
  int32_t first_fresh = 0;
  int64_t listed_tokens = 0;

  // Whether the same operations serve both: budgets may differ, and first layers, for a sequence says in each layer
  // whether it selects there.
  bool SharesStep(const ScoringPlan& other) const {
    return scoring == other.scoring && num_dims == other.num_dims && window == other.window;
  }
  // An order of the ways.
  bool OrdersBefore(const ScoringPlan& other) const {
    return std::tie(scoring, num_dims, window) < std::tie(other.scoring, other.num_dims, other.window);
  }
  // Positions of a list at most.
  int64_t list_tokens() const {
    const int64_t chosen = scoring == TokenScoring::kNone ? 0 : int64_t{budget} + (window > 0 ? window - 1 : 0);
    return std::max(chosen, listed_tokens);
  }
};

class PromptSelector;

// One object per sequence; used by the engine thread only, but for Select: of a model on several ranks each rank's
// thread asks for its own heads, at the same time. Decides, never runs kernels.
class TokenSelector {
 public:
  virtual ~TokenSelector() = default;
  virtual std::string_view name() const = 0;
  virtual bool is_exact() const = 0;
  // Asked once for each step, in front of everything else: the step writes position kv_len - 1.
  virtual void BeginStep(int64_t /*kv_len*/) {}
  // What the query of `kv_head` in `layer` attends to in this step. Spans stay valid until the next step. kSelected:
  // what this step chooses.
  virtual kernels::HeadVisibility Select(int32_t layer, int32_t kv_head) = 0;
  // Selectors of one model with equal keys select the same for every layer and head: a recorded step may be replayed.
  virtual uint64_t plan_key() const = 0;
  // False: hardly another sequence selects the same, so that a step is not worth recording for this plan alone.
  virtual bool shares_plan() const { return true; }

  virtual ScoringPlan scoring() const { return {}; }
  // The positions that streams may choose from beside what is fresh, where these are known without a choice; whoever
  // begins decoding writes them to the compact pages (BeginLists). Empty: nothing is.
  virtual KeptPositions lists() const { return {}; }
  // Which streams have lists, and how many positions are in one at most when decoding begins behind so many tokens.
  virtual bool Lists(int32_t /*layer*/, int32_t /*kv_head*/) const { return false; }
  virtual int64_t most_listed(int64_t /*num_tokens*/) const { return 0; }
  // Null: this selector needs nothing of the prompt (runtime/prompt_replay.h).
  virtual PromptSelector* of_prompt() { return nullptr; }
  // Whether tokens of this stream are ever chosen by scores: it then has compact pages.
  virtual bool Chooses(int32_t /*layer*/, int32_t /*kv_head*/) const { return false; }
  // What the layers do in this step; empty: nothing is chosen in any. [num_layers]
  virtual std::span<const kernels::LayerSelection> layers() const { return {}; }
};

// What a sequence with this selector keeps beside its KV when decoding begins behind `num_tokens` positions; nothing:
// std::nullopt.
std::optional<CompactPages::Needs> CompactNeedsOf(const TokenSelector& selector, const Model& model,
                                                  int64_t num_tokens);
// Its pages, for no positions yet; null where there are none. Errors as CompactPages::Create.
absl::StatusOr<std::unique_ptr<CompactPages>> MakeCompactPages(const TokenSelector& selector, const Model& model,
                                                               PagePool& pool, int64_t num_tokens);
// Pages of a selector of the same method become those of this one, with room for the step behind `num_tokens`
// positions; null where it needs none. Errors as CompactPages::Become.
absl::Status FitCompactPages(const TokenSelector& selector, const Model& model, int64_t num_tokens,
                             std::unique_ptr<CompactPages>& pages);

}  // namespace spl::engine
