#include "services/engine/cache/segment_source.h"

#include <algorithm>
#include <utility>

#include "services/base/check.h"
#include "services/engine/cache/segment_summary.h"

namespace spl::engine {
namespace {

// Most tokens in front of a copy that may differ from the text in front of it here. They are the farthest ones, for
// example the start of the instructions.
constexpr size_t kForeignTokensMax = kernels::kPageTokens;

// Length of the common end of the two.
size_t CommonEnd(std::span<const int32_t> a, std::span<const int32_t> b) {
  return static_cast<size_t>(std::mismatch(a.rbegin(), a.rend(), b.rbegin(), b.rend()).first - a.rbegin());
}

}  // namespace

SegmentSource::SegmentSource(const SequenceKv& kv, int32_t begin, std::span<const int32_t> tokens, bool isolated,
                             std::shared_ptr<const std::vector<int32_t>> prompt)
    : pool_(kv.pool()),
      begin_(begin),
      first_slot_(begin % kernels::kPageTokens),
      tokens_(tokens.begin(), tokens.end()),
      isolated_(isolated),
      prompt_(std::move(prompt)) {
  SPLICE_CHECK(prompt_ == nullptr || prompt_->size() >= static_cast<size_t>(begin),
               "all text in front is known, or none");
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
                             std::span<const int32_t> tokens, bool isolated, bool whole)
    : pool_(pool),
      begin_(begin),
      first_slot_(0),
      tokens_(tokens.begin(), tokens.end()),
      isolated_(isolated),
      whole_(whole),
      pages_(std::move(pages)) {
  SPLICE_CHECK(
      !pages_.empty() && pages_[0].size() == static_cast<size_t>(PagesFor(static_cast<int64_t>(tokens.size()))),
      "pages for all tokens");
}

SegmentSource::~SegmentSource() {
  for (const auto& pages : pages_) pool_.Release(pages);
}

std::optional<std::span<const int32_t>> SegmentSource::text_in_front() const {
  if (begin_ == 0) return std::span<const int32_t>();
  if (prompt_ == nullptr) return std::nullopt;
  return std::span(*prompt_).first(begin_);
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

bool StandsInItsContext(const SegmentHit& hit, std::span<const int32_t> tokens, int32_t first_copy) {
  if (hit.source->isolated()) return false;
  const std::optional<std::span<const int32_t>> seen = hit.source->text_in_front();
  if (!seen.has_value()) return false;
  const std::span<const int32_t> own = hit.source->tokens().first(hit.offset);
  const std::span<const int32_t> here = tokens.first(hit.target);
  size_t same = CommonEnd(here, own);
  if (same == own.size()) same += CommonEnd(here.first(here.size() - own.size()), *seen);
  return same >= static_cast<size_t>(hit.target - first_copy) && own.size() + seen->size() - same <= kForeignTokensMax;
}

}  // namespace spl::engine
