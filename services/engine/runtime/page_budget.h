// Makes room for new prompts: decides which cached KV is evicted first if the pool is full.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "services/engine/cache/page_pool.h"
#include "services/engine/runtime/local_kv.h"

namespace spl::engine {

// Segment sources, sessions and prefix entries share pages: a page becomes free when the last of them lets go of it.
class PageBudget {
 public:
  // `pool` and `kept` outlive it. `frozen_share`: share of the pool's pages that frozen sources may hold before they
  // are evicted first. `reclaim` evicts a little of what is cached elsewhere (PrefillEngineOptions); false: nothing is
  // left there; null: there is nothing.
  PageBudget(PagePool& pool, LocalKv& kept, double frozen_share, std::function<bool()> reclaim)
      : pool_(pool),
        kept_(kept),
        frozen_pages_max_(static_cast<int64_t>(frozen_share * static_cast<double>(pool.num_pages()))),
        reclaim_(std::move(reclaim)) {}

  // Evicts until `num_pages` are free. Order: frozen sources beyond their share, unused prefixes, `reclaim`, ordinary
  // segment sources, sessions under their lease, and last, if `may_drop_frozen`, frozen sources. False: not enough is
  // left to evict. Any thread.
  bool MakeRoom(int64_t num_pages, bool may_drop_frozen);

  // Notes a sequence that was handed out: its pages return when its last user lets go. Engine thread.
  void HandOut(std::weak_ptr<const SequenceKv> kv) { handed_out_.push_back(std::move(kv)); }
  // Whether such pages have not returned yet. Engine thread.
  bool HasHandedOut();

 private:
  PagePool& pool_;
  LocalKv& kept_;
  const int64_t frozen_pages_max_;
  const std::function<bool()> reclaim_;
  std::vector<std::weak_ptr<const SequenceKv>> handed_out_;
};

}  // namespace spl::engine
