#include "services/engine/runtime/segment_fetcher.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include "services/base/trace.h"
#include "services/engine/cache/chunk_io.h"
#include "services/engine/cache/quantized_kv.h"
#include "services/engine/cache/segment_io.h"

namespace spl::engine {
namespace {

// A store reads one document from its disk while another one travels.
constexpr size_t kSegmentsAtATime = 4;

}  // namespace

void SegmentFetcher::Fetch(std::span<const WantedSegment> wanted, const RecoveryPolicy& policy, Deadline deadline,
                           const std::function<bool()>& stop,
                           const std::function<void(FetchedSegments&&)>& deliver) const {
  std::unordered_map<chunk::ChunkKey, std::vector<size_t>, chunk::ChunkKeyHash> with_text;  // numbers of `wanted`
  std::vector<std::vector<size_t>> texts;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i].only_whole) {
      texts.push_back({i});
    } else {
      with_text[wanted[i].keys.back()].push_back(i);
    }
  }
  for (auto& [key, numbers] : with_text) texts.push_back(std::move(numbers));
  std::sort(texts.begin(), texts.end());
  std::mutex mutex;  // held while `deliver` runs
  std::atomic<size_t> next{0};
  const TraceContext trace = CurrentTrace();  // a copy: this thread's own changes below
  const auto fetch = [&] {
    const TraceScope scope(trace);
    for (size_t i = next++; i < texts.size() && !stop(); i = next++) {
      const Fetched fetched = FetchOne(wanted[texts[i].front()], policy, deadline);
      FetchedSegments delivered{.num_bytes = fetched.num_bytes};
      for (const size_t number : texts[i]) {
        delivered.asked_tokens += static_cast<int64_t>(wanted[number].text.size());
        if (fetched.part != nullptr) delivered.parts.emplace(wanted[number].index, fetched.part);
        if (fetched.came) delivered.num_tokens += static_cast<int64_t>(wanted[number].text.size());
      }
      if (fetched.not_quantized) delivered.not_quantized.push_back(wanted[texts[i].front()].index);
      std::lock_guard lock(mutex);
      deliver(std::move(delivered));
    }
  };
  std::vector<std::thread> helpers;
  for (size_t i = 1; i < std::min(kSegmentsAtATime, texts.size()); ++i) helpers.emplace_back(fetch);
  fetch();
  for (std::thread& helper : helpers) helper.join();
}

int64_t SegmentFetcher::ExpectedBytes(const WantedSegment& wanted, const RecoveryPolicy& policy) const {
  const auto num_chunks = static_cast<int64_t>(wanted.keys.size());
  const auto whole = static_cast<int64_t>(ChunkPayloadBytes(*model_));
  if (wanted.only_whole) return num_chunks * whole;
  if (const std::optional<int32_t> first_layer = policy.FirstQuantizedLayer(true); first_layer.has_value())
    return num_chunks * static_cast<int64_t>(QuantizedChunkBytes(model_->config(), *first_layer));
  if (policy.wants_summaries()) {
    if (const auto tiles = policy.TilesRead(static_cast<int32_t>(num_chunks)); tiles.has_value())
      return static_cast<int64_t>(tiles->size()) * whole;
  }
  return num_chunks * whole;
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
  fetched.came = true;
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
    fetched.came = true;
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
  fetched.came = true;
  return true;
}

}  // namespace spl::engine
