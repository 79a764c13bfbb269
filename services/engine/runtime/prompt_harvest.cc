#include "services/engine/runtime/prompt_harvest.h"

#include <algorithm>
#include <utility>

#include "services/engine/cache/segment_summary.h"
#include "services/engine/runtime/local_generator.h"

namespace spl::engine {
namespace {

// A context that is published notes its segments' summaries on the way.
void KeepLocalSummary(const PrefillJob& job, const PositionRange& segment, const SegmentSource& source) {
  if (job.publish) source.KeepSummary(job.policy->LocalSummaryOf(segment));
}

SourceContext ContextFor(const PrefillJob& job, const ReuseSpan& segment) {
  const auto& segments = job.request.segments;
  return SourceContextOf(segment.namespace_key, job.request.tokens, segment.range.begin,
                         segments.empty() ? 0 : segments.front().range.begin);
}

}  // namespace

void PromptHarvest::Start(std::function<double(int64_t first, int32_t count)> recompute_seconds,
                          std::function<void()> on_released, std::function<bool(SteadyTime)> wait_for_idle) {
  if (options_.store == nullptr) return;
  publisher_ = std::make_unique<ChunkPublisher>(
      model_, ChunkPublisherOptions{.store = options_.store,
                                    .offer_timeout = options_.store_timeout,
                                    .order_timeout = options_.publish_timeout,
                                    .max_offers = options_.max_publish_queued,
                                    .max_offered_chunks = static_cast<size_t>(
                                        options_.publish_share * static_cast<double>(pool_.num_pages()) /
                                        static_cast<double>(KvShapeOf(model_->config()).num_streams())),
                                    .wait_for_idle = std::move(wait_for_idle),
                                    .max_delay = options_.publish_delay_max,
                                    .max_orders = options_.max_publish_calls,
                                    .order_threads = std::clamp<size_t>(std::thread::hardware_concurrency() / 4, 2, 4),
                                    .recompute_seconds = std::move(recompute_seconds),
                                    .on_released = std::move(on_released)});
}

void PromptHarvest::Stop() {
  if (publisher_ != nullptr) publisher_->Stop();
}

void PromptHarvest::Keep(const PrefillJob& job) {
  if (options_.prefix_cache) IndexPrefix(job);
  IndexSegments(job);
  KeepSession(job);
  if (options_.canonical_prefill) NoteMissingSegments(job);
  if (!publishes()) return;
  if (job.stats.summaries_computed > 0) OfferSummaries(job);
  if (options_.quantize_published) OfferQuantized(job);
}

void PromptHarvest::IndexPrefix(const PrefillJob& job) {
  local_.prefixes.Insert(job.keys, *job.kv);
  const auto exact = std::min(job.keys.size(), static_cast<size_t>(job.kv->exact_tokens() / kernels::kPageTokens));
  const auto cached = static_cast<size_t>(job.stats.cached_tokens / kernels::kPageTokens);
  const size_t known = std::max(cached, job.num_stored_chunks());
  if (publishes() && !job.publish && known < exact)
    (void)publisher_->Offer({job.kv,
                             nullptr,
                             {job.keys.begin(), job.keys.begin() + static_cast<int64_t>(exact)},
                             job.request.namespace_key,
                             known});
}

void PromptHarvest::IndexSegments(const PrefillJob& job) {
  const PrefillRequest& request = job.request;
  std::vector<ReuseSpan> offered = request.segments;
  if (request.reuse_auto) {
    for (const PositionRange& range : job.UnmarkedText({0, static_cast<int32_t>(request.tokens.size())}))
      offered.push_back({range, request.namespace_key});
  }
  for (const ReuseSpan& segment : offered) {
    if (segment.shared) continue;  // its source is computed by itself (NoteMissingSegments)
    const auto end = std::min<int32_t>(segment.range.end, static_cast<int32_t>(job.kv->exact_tokens()));
    if (end - segment.range.begin < std::min(segment.range.size(), chunk::kChunkTokens) || end <= segment.range.begin)
      continue;
    const auto text = job.text_of({segment.range.begin, end});
    auto source = std::make_shared<SegmentSource>(*job.kv, segment.range.begin, text, ContextFor(job, segment));
    KeepLocalSummary(job, segment.range, *source);
    if (local_.segments.Insert(segment.namespace_key, source, segment.frozen) && !job.publish)
      Offer(source, local_.segments.KeysOf(segment.namespace_key, text), segment.namespace_key,
            job.policy->ReadsQuantized());
  }
}

// Pages of its own, so that the sequence that was handed out ends when its push does. A next turn would take tokens
// that a policy left out for seen: such a prompt stays with its request.
void PromptHarvest::KeepSession(const PrefillJob& job) {
  const PrefillRequest& request = job.request;
  if (request.session.empty() || job.kept != nullptr || !job.only.empty()) return;
  auto kept = std::make_shared<SequenceKv>(pool_, KvShapeOf(model_->config()));
  kept->AppendLeading(*job.kv, static_cast<int32_t>(job.kv->num_tokens() / kernels::kPageTokens));
  local_.sessions.Keep(SessionOf(request), job.keys, MethodOf(request.reuse), std::move(kept),
                       std::chrono::steady_clock::now());
}

// Remembers the segments that have no source, for they stood behind a copy, and those whose source has seen other text:
// the next prompts put them behind yet another one.
void PromptHarvest::NoteMissingSegments(const PrefillJob& job) {
  if (job.request.segments.empty()) return;
  const PositionRange lead{0, std::min(job.request.segments.front().range.begin, kLeadTokensMax)};
  for (size_t i = 0; i < job.request.segments.size(); ++i) {
    const ReuseSpan& segment = job.request.segments[i];
    if (segment.range.size() < kSegmentTokensMin || job.fetched.parts.contains(i)) continue;  // the store has it
    const auto text = job.text_of(segment.range);
    std::vector<chunk::ChunkKey> keys = local_.segments.KeysOf(segment.namespace_key, text);
    const bool foreign = !IntersectionOf(job.foreign_copies, {&segment.range, 1}).empty();
    if (foreign ? local_.segments.ContainsFirst(keys) : local_.segments.Contains(keys)) continue;
    const auto in_front = job.text_of(segment.shared ? PositionRange{0, 0} : lead);
    canonical_.Add({.namespace_key = segment.namespace_key,
                    .lead = {in_front.begin(), in_front.end()},
                    .tokens = {text.begin(), text.end()},
                    .keys = std::move(keys),
                    .frozen = segment.frozen,
                    .quantized = job.policy->ReadsQuantized(),
                    .replaces = foreign});
  }
}

// Summaries that were computed because the store had none are there from now on.
void PromptHarvest::OfferSummaries(const PrefillJob& job) {
  for (const ReuseSpan& segment : job.request.segments) {
    const std::shared_ptr<const SegmentSource> source = local_.WholeSourceOf(job, segment);
    if (source == nullptr) continue;
    const std::shared_ptr<const SegmentSummary> summary = source->summary();
    if (summary == nullptr || summary->local_query.empty()) continue;
    std::vector<chunk::ChunkKey> keys = local_.segments.KeysOf(segment.namespace_key, source->tokens());
    const size_t num_chunks = keys.size();  // which are published with the segment
    (void)publisher_->Offer({nullptr, source, std::move(keys), segment.namespace_key, num_chunks});
  }
}

// All KV was fetched for want of quantized copies: the next worker finds some.
void PromptHarvest::OfferQuantized(const PrefillJob& job) {
  for (const size_t i : job.fetched.not_quantized) {
    const ReuseSpan& segment = job.request.segments[i];
    if (auto source = local_.WholeSourceOf(job, segment); source != nullptr)
      Offer(std::move(source), job.segment_keys[i], segment.namespace_key, true);
  }
}

void PromptHarvest::Offer(std::shared_ptr<const SegmentSource> source, std::vector<chunk::ChunkKey> keys,
                          const chunk::Digest& namespace_key, bool quantized) {
  if (!publishes()) return;
  (void)publisher_->Offer({.kv = nullptr,
                           .source = std::move(source),
                           .keys = std::move(keys),
                           .namespace_key = namespace_key,
                           .quantized = quantized && options_.quantize_published});
}

absl::Status PromptHarvest::Publish(PrefillJob& job, std::function<void(absl::Status, const PublishTally&)> on_done) {
  PublishOrder order{.runs = {},
                     .put = job.publish->put,
                     .deadline = job.request.deadline,
                     .cancelled = job.request.cancelled,
                     .on_done = std::move(on_done)};
  for (const ReuseSpan& segment : job.publish->segments) {
    const auto text = job.text_of(segment.range);
    // Exact: the policy of a published context copies nothing.
    auto source = std::make_shared<SegmentSource>(*job.kv, segment.range.begin, text, ContextFor(job, segment));
    KeepLocalSummary(job, segment.range, *source);
    order.runs.push_back({.kv = nullptr,
                          .source = std::move(source),
                          .keys = local_.segments.KeysOf(segment.namespace_key, text),
                          .namespace_key = segment.namespace_key,
                          .quantized = options_.quantize_published});
  }
  job.kv.reset();  // the sources keep what is needed
  if (publisher_->Order(std::move(order))) return absl::OkStatus();
  return absl::UnavailableError("the prefill worker is stopping");
}

}  // namespace spl::engine
