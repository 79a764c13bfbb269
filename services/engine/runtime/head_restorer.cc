#include "services/engine/runtime/head_restorer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "services/base/status.h"
#include "services/engine/recovery/edge_restore.h"

namespace spl::engine {
namespace {

constexpr double kOfflineMargin =
    1.25;  // over what profiling saw, as during prefill (docs/methods/redknot.md, "Restore")

}  // namespace

absl::Status ValidateHeadRestoreOptions(const HeadRestoreOptions& options) {
  if (options.interval < 1 || options.interval > 1 << 20)
    return InvalidArgument("decode_restore_interval is {}, it must be 1 to {}", options.interval, 1 << 20);
  if (options.threshold != -1 && !(options.threshold >= 0 && options.threshold <= 1))
    return InvalidArgument("decode_restore_threshold is {}, it must be 0 to 1", options.threshold);
  return absl::OkStatus();
}

absl::Status CheckHeadRestore(const HeadRestoreOptions& options, const TokenSelector& selector, const Model& model) {
  SPLICE_RETURN_IF_ERROR(ValidateHeadRestoreOptions(options));
  if (selector.name() != "head_classes")
    return InvalidArgument("decode_restore needs the decode method head_classes, and this request has '{}'",
                           selector.name());
  if (!model.backend().host_memory())
    return Errorf(absl::StatusCode::kUnimplemented,
                  "decode_restore is not served on this device ({}): heads are probed by the host; leave it out, or "
                  "decode with full_kv",
                  model.backend().description());
  return absl::OkStatus();
}

HeadPages::~HeadPages() {
  for (const std::vector<int32_t>& list : pages) pool.Release(list);
}

HeadRestorer::HeadRestorer(const HeadRestoreOptions& options, const ModelConfig& config, const HeadClassMap& map,
                           std::shared_ptr<HeadSource> source, SequenceKv& kv, HeadRestoreReport& report)
    : options_(options), source_(std::move(source)), report_(report) {
  const StreamClasses& classes = *kv.classes();
  const auto num_streams = static_cast<size_t>(kv.shape().num_streams());
  const HeadProfile& profile = map.profile();
  probe_.summaries.resize(num_streams);
  probe_.outside.resize(num_streams);
  thresholds_.resize(num_streams);
  int64_t local = 0, restored = 0;
  for (size_t s = 0; s < num_streams; ++s) {
    const auto layer = static_cast<int32_t>(s) / config.num_kv_heads;
    const auto head = static_cast<int32_t>(s) % config.num_kv_heads;
    const bool was_local = !map.served(layer, head).is_global;
    local += was_local;
    restored += was_local && classes[s].is_global;
    const double offline = profile.edge_mass_q99.empty() ? 0 : double{profile.edge_mass_q99[s]};
    thresholds_[s] = static_cast<float>(
        options_.threshold < 0 ? options_.threshold : std::max(options_.threshold, kOfflineMargin * offline));
  }
  left_ = static_cast<int32_t>(std::max<int64_t>(
      0, static_cast<int64_t>(std::floor(options_.share * static_cast<double>(local) + 1e-9)) - restored));
  for (const KeySummary& summary : source_->summaries()) {
    const PageHole hole = kv.hole(summary.stream);
    const bool whole = config.visibility(summary.stream / config.num_kv_heads).rule == kernels::VisibilityRule::kFull;
    if (whole && hole.size() > 0 && hole == PageHole{summary.first_page, summary.first_page + summary.num_pages})
      probe_.summaries[summary.stream] = &summary;
  }
  kv.FreezeHoles();
}

bool HeadRestorer::Apply(SequenceKv& kv, int64_t output_token) {
  bool restored = false;
  if (fetch_ != nullptr) {
    absl::Status status;
    {
      std::lock_guard lock(fetch_->mutex);
      if (!fetch_->done) return false;
      status = fetch_->status;
    }
    fetch_.reset();
    const std::shared_ptr<HeadPages> pages = std::move(pages_);
    for (size_t i = 0; i < pages->streams.size(); ++i) {
      if (!status.ok()) {
        Miss(absl::IsNotFound(status) ? &HeadRestoreReport::missed_lease : &HeadRestoreReport::missed_fetch,
             pages->streams[i]);
        continue;
      }
      kv.Restore(pages->streams[i], pages->pages[i]);
      pages->pages[i].clear();
      ++report_.restored;
      restored = true;
    }
    if (restored && report_.first_token < 0) report_.first_token = output_token;
  }
  if (source_ == nullptr) return restored;
  const bool any = left_ > 0 && std::any_of(probe_.summaries.begin(), probe_.summaries.end(),
                                            [](const KeySummary* summary) { return summary != nullptr; });
  // What leaves a window from here on is of no use any more.
  if (frozen_ && (!any || !source_->alive())) {
    frozen_ = false;
    kv.ThawHoles();
  }
  if (!any) source_.reset();
  return restored;
}

HeadProbe* HeadRestorer::BeginStep() {
  ++steps_;
  probing_ = source_ != nullptr && fetch_ == nullptr && steps_ % options_.interval == 0;
  return probing_ ? &probe_ : nullptr;
}

void HeadRestorer::Miss(int64_t HeadRestoreReport::*reason, int32_t stream) {
  ++(report_.*reason);
  probe_.summaries[stream] = nullptr;
}

void HeadRestorer::EndStep(SequenceKv& kv, std::span<const int64_t> keep_free) {
  if (!std::exchange(probing_, false)) return;
  std::vector<int32_t> asked;
  std::vector<float> outside, thresholds;
  for (size_t s = 0; s < probe_.summaries.size(); ++s) {
    if (probe_.summaries[s] == nullptr) continue;
    asked.push_back(static_cast<int32_t>(s));
    outside.push_back(probe_.outside[s]);
    thresholds.push_back(thresholds_[s]);
  }
  std::vector<int32_t> streams;
  for (const int32_t i : HeadsToRestore(outside, thresholds, left_)) streams.push_back(asked[i]);
  if (streams.empty()) return;
  left_ -= static_cast<int32_t>(streams.size());
  if (!source_->alive()) {
    for (const int32_t stream : streams) Miss(&HeadRestoreReport::missed_lease, stream);
  } else if (!Start(kv, streams, keep_free)) {
    for (const int32_t stream : streams) Miss(&HeadRestoreReport::missed_pages, stream);
  }
}

// False: there are not enough pages.
bool HeadRestorer::Start(SequenceKv& kv, const std::vector<int32_t>& streams, std::span<const int64_t> keep_free) {
  PagePool& pool = kv.pool();
  const int32_t heads_of_rank = kv.shape().num_kv_heads / pool.view().num_ranks();
  const auto rank_of = [&](int32_t stream) {
    return static_cast<size_t>(stream % kv.shape().num_kv_heads / heads_of_rank);
  };
  std::vector<int64_t> counts(pool.view().num_ranks());
  for (const int32_t stream : streams) counts[rank_of(stream)] += kv.hole(stream).size();
  std::vector<int64_t> needed = counts;
  for (size_t r = 0; r < needed.size(); ++r) needed[r] += keep_free[r];
  std::vector<int32_t> pages;
  if (!pool.HasFree(needed) || !pool.AllocateByRank(counts, pages).ok()) return false;
  std::vector<std::vector<int32_t>> lists(streams.size());
  auto next = pages.begin();
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    for (size_t i = 0; i < streams.size(); ++i) {
      if (rank_of(streams[i]) != rank) continue;
      const auto end = next + kv.hole(streams[i]).size();
      lists[i].assign(next, end);
      next = end;
    }
  }
  for (const int32_t stream : streams) probe_.summaries[stream] = nullptr;  // once is enough
  pages_ = std::make_shared<HeadPages>(pool, streams, std::move(lists));
  fetch_ = std::make_shared<Fetch>();
  source_->Fetch(pages_, [fetch = fetch_](const absl::Status& status) {
    std::lock_guard lock(fetch->mutex);
    fetch->done = true;
    fetch->status = status;
  });
  return true;
}

}  // namespace spl::engine
