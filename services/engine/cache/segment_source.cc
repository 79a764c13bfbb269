#include "services/engine/cache/segment_source.h"

#include <utility>

#include "services/base/check.h"
#include "services/engine/cache/segment_summary.h"

namespace spl::engine {
SegmentSource::SegmentSource(const SequenceKv& kv, int32_t begin, std::span<const int32_t> tokens,
                             const SourceContext& context)
    : pool_(kv.pool()),
      begin_(begin),
      first_slot_(begin % kernels::kPageTokens),
      tokens_(tokens.begin(), tokens.end()),
      context_(context) {
  const int32_t end = begin + static_cast<int32_t>(tokens.size());
  SPLICE_CHECK(kv.is_whole(), "a view is no source of a segment");
  SPLICE_CHECK(!tokens.empty() && begin >= 0 && end <= kv.exact_tokens(), "a source is written and exact");
  const int32_t first_page = begin / kernels::kPageTokens, num_pages = PagesFor(end) - first_page;
  for (int32_t layer = 0; layer < kv.shape().num_layers; ++layer) {
    for (int32_t head = 0; head < kv.shape().num_kv_heads; ++head) {
      const auto pages = kv.stream(layer, head).subspan(first_page, num_pages);
      pool_.Share(pages);
      pages_.emplace_back(pages.begin(), pages.end());
    }
  }
}

SegmentSource::SegmentSource(PagePool& pool, std::vector<std::vector<int32_t>> pages, int32_t begin,
                             std::span<const int32_t> tokens, const SourceContext& context, bool whole)
    : pool_(pool),
      begin_(begin),
      first_slot_(0),
      tokens_(tokens.begin(), tokens.end()),
      context_(context),
      whole_(whole),
      pages_(std::move(pages)) {
  SPLICE_CHECK(
      !pages_.empty() && pages_[0].size() == static_cast<size_t>(PagesFor(static_cast<int64_t>(tokens.size()))),
      "pages for all tokens");
}

SegmentSource::~SegmentSource() {
  for (const auto& pages : pages_) pool_.Release(pages);
}

std::shared_ptr<const SegmentSummary> SegmentSource::summary() const {
  std::lock_guard lock(summary_mutex_);
  return summary_;
}

std::shared_ptr<const SegmentSummary> SegmentSource::KeepSummary(SegmentSummary part) const {
  std::lock_guard lock(summary_mutex_);
  if (summary_ != nullptr) {
    if (part.tile_means.empty()) part.tile_means = summary_->tile_means;
    if (part.local_query.empty()) {
      part.local_query = summary_->local_query;
      part.attended = summary_->attended;
    }
  }
  summary_ = std::make_shared<const SegmentSummary>(std::move(part));
  return summary_;
}

}  // namespace spl::engine
