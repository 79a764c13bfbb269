#include "services/engine/runtime/page_budget.h"

namespace spl::engine {

bool PageBudget::MakeRoom(int64_t num_pages, bool may_drop_frozen) {
  SegmentIndex& segments = kept_.segments;
  while (pool_.num_free() < num_pages) {
    if (segments.frozen_pages() > frozen_pages_max_ && segments.EvictFrozen()) continue;
    if (kept_.prefixes.EvictUntilFree(num_pages)) break;
    if (reclaim_ && reclaim_()) continue;
    if (!segments.EvictOne() && !kept_.sessions.EvictOne() && !(may_drop_frozen && segments.EvictFrozen()))
      return false;
  }
  return true;
}

bool PageBudget::HasHandedOut() {
  std::erase_if(handed_out_, [](const auto& kv) { return kv.expired(); });
  return !handed_out_.empty();
}

}  // namespace spl::engine
