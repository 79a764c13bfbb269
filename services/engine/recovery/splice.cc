#include "services/engine/recovery/splice.h"

#include <algorithm>
#include <cmath>

namespace spl::engine {

void SplicePolicy::Prepare(const ReuseLayout& layout) {
  SparseXPolicy::Prepare(layout);
  reuses_ = !layout.reused.empty();
  plan_.Begin(layout, dense_layers());
}

void SplicePolicy::RefineScore(const ReuseLayout& layout, ScoreRequest& score) const {
  score.kv_heads = plan_.GlobalHeads(score.layer);
  if (options().policy != "splice+" || options().rec_frac < 0) return;
  const int64_t others = CountOf(RowsWithoutScores(layout));
  const auto wanted = static_cast<int64_t>(std::ceil(options().rec_frac * layout.num_tokens));
  // Those that are computed anyway may be among the best, too: with all of the prompt wanted all are taken.
  const int64_t reused = CountOf(layout.reused);
  score.k = wanted >= layout.num_tokens ? reused : std::clamp(wanted - others, score.k, std::max(reused, score.k));
}

}  // namespace spl::engine
