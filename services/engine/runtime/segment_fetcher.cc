#include "services/engine/runtime/segment_fetcher.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <unordered_map>
#include <utility>

#include "services/base/trace.h"
#include "services/engine/cache/segment_io.h"

namespace spl::engine {
namespace {

// A store reads one document from its disk while another one travels.
constexpr size_t kSegmentsAtATime = 4;

}  // namespace

FetchedSegments SegmentFetcher::Fetch(std::span<const WantedSegment> wanted, const RecoveryPolicy& policy,
                                      Deadline deadline, const std::function<bool()>& stop) const {
  std::unordered_map<chunk::ChunkKey, size_t, chunk::ChunkKeyHash> first_with;  // numbers of `wanted`, by text
  std::vector<size_t> texts;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i].only_whole || first_with.try_emplace(wanted[i].keys.back(), i).second) texts.push_back(i);
  }
  std::vector<Fetched> fetched(wanted.size());
  std::atomic<size_t> next{0};
  const TraceContext trace = CurrentTrace();  // a copy: this thread's own changes below
  const auto fetch = [&] {
    const TraceScope scope(trace);
    for (size_t i = next++; i < texts.size() && !stop(); i = next++)
      fetched[texts[i]] = FetchOne(wanted[texts[i]], policy, deadline);
  };
  std::vector<std::thread> helpers;
  for (size_t i = 1; i < std::min(kSegmentsAtATime, texts.size()); ++i) helpers.emplace_back(fetch);
  fetch();
  for (std::thread& helper : helpers) helper.join();
  FetchedSegments all;
  for (size_t i = 0; i < wanted.size(); ++i) {
    all.num_bytes += fetched[i].num_bytes;
    const auto& part = fetched[wanted[i].only_whole ? i : first_with.at(wanted[i].keys.back())].part;
    if (part != nullptr) all.parts.emplace(wanted[i].index, part);
    if (fetched[i].not_quantized) all.not_quantized.push_back(wanted[i].index);
  }
  return all;
}

SegmentFetcher::Fetched SegmentFetcher::FetchOne(const WantedSegment& wanted, const RecoveryPolicy& policy,
                                                 Deadline deadline) const {
  Fetched fetched;
  if (FetchQuantized(wanted, policy, deadline, fetched)) return fetched;
  std::optional<FetchedSummary> summary;
  if (FetchParts(wanted, policy, deadline, fetched, summary)) return fetched;
  // Into pages of their own, where the lookup finds them as it finds what was computed here.
  FetchedSegment whole = FetchSegment(*store_, wanted.keys, wanted.text, *model_, pool_, deadline, make_room_);
  fetched.num_bytes += whole.num_bytes;
  if (whole.source == nullptr || (wanted.shared && !whole.source->isolated())) return fetched;
  fetched.not_quantized = policy.ReadsQuantized() && whole.source->tokens().size() == wanted.text.size();
  if (summary.has_value() && whole.source->begin() == summary->begin &&
      whole.source->tokens().size() == wanted.text.size())
    whole.source->KeepSummary(std::move(summary->summary));
  segments_.Insert(wanted.namespace_key, std::move(whole.source), wanted.frozen);
  return fetched;
}

bool SegmentFetcher::FetchQuantized(const WantedSegment& wanted, const RecoveryPolicy& policy, Deadline deadline,
                                    Fetched& fetched) const {
  if (wanted.only_whole) return false;
  std::optional<int32_t> asked;
  for (const bool isolated : {true, false}) {
    const std::optional<int32_t> first_layer = policy.FirstQuantizedLayer(isolated);
    if (!first_layer.has_value() || first_layer == asked) continue;  // small models: the same for both
    asked = first_layer;
    FetchedSegment copy = FetchQuantizedSegment(*store_, wanted.keys, wanted.text, wanted.namespace_key, *first_layer,
                                                *model_, pool_, deadline, make_room_);
    fetched.num_bytes += copy.num_bytes;
    if (copy.source == nullptr || (wanted.shared && !copy.source->isolated())) continue;
    fetched.part = std::move(copy.source);
    return true;
  }
  return false;
}

bool SegmentFetcher::FetchParts(const WantedSegment& wanted, const RecoveryPolicy& policy, Deadline deadline,
                                Fetched& fetched, std::optional<FetchedSummary>& summary) const {
  if (!policy.wants_summaries()) return false;
  summary = FetchSummary(*store_, SummaryKeyOf(wanted.keys, model_->kv_fingerprint(), wanted.namespace_key),
                         wanted.text.size(), *model_, deadline);
  if (summary.has_value() && wanted.shared && !summary->context.isolated) summary.reset();
  if (!summary.has_value()) return false;
  fetched.num_bytes += summary->num_bytes;
  const std::optional<std::vector<int32_t>> tiles =
      policy.TilesRead(PagesFor(static_cast<int64_t>(wanted.text.size())));
  const bool enough =
      !summary->summary.tile_means.empty() && (!policy.wants_local_queries() || !summary->summary.local_query.empty());
  // Of the rest of a segment whose start is a prefix there is no summary.
  if (!tiles.has_value() || !enough || wanted.only_whole) return false;
  FetchedSegment part = FetchSegmentChunks(*store_, wanted.keys, *tiles, wanted.text, summary->begin, summary->context,
                                           *model_, pool_, deadline, make_room_);
  fetched.num_bytes += part.num_bytes;
  if (part.source == nullptr) return false;
  part.source->KeepSummary(summary->summary);
  fetched.part = std::move(part.source);
  return true;
}

}  // namespace spl::engine
