#include "services/engine/runtime/prompt_fetcher.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "services/base/fault_point.h"
#include "services/base/trace.h"
#include "services/engine/cache/chunk_io.h"
#include "services/engine/runtime/metered_store.h"

namespace spl::engine {
namespace {

using Clock = std::chrono::steady_clock;

FaultPoint fetch_fault("engine.prefill.fetch");

constexpr std::chrono::milliseconds kIdleWait{100};  // a safety net: Stop closes the queue
// A link that was too slow is measured again so often, by reading so much that no prompt waits for.
constexpr std::chrono::seconds kProbeAge{10};
constexpr size_t kProbeBytes = 4 << 20;
constexpr size_t kProbeChunksMin = 6;  // LinkMeter measures a rate from five on

// Segments that reach beyond the first `num_chunks` chunks that are fetched of the prompt's start.
std::vector<WantedSegment> WantedBehind(const PrefillJob& job, const PromptFetch& fetch, size_t num_chunks) {
  const auto begin = static_cast<int64_t>((fetch.first_chunk + num_chunks) * chunk::kChunkTokens);
  std::vector<WantedSegment> behind;
  std::copy_if(fetch.wanted.begin(), fetch.wanted.end(), std::back_inserter(behind), [&](const WantedSegment& wanted) {
    return num_chunks == 0 || job.request.segments[wanted.index].range.end > begin;
  });
  return behind;
}

}  // namespace

PromptFetcher::PromptFetcher(std::shared_ptr<const Model> model, PagePool& pool, LocalKv& local, PageBudget& budget,
                             const PrefillMeter& meter, const PrefillEngineOptions& options,
                             std::function<void()> on_progress)
    : model_(std::move(model)),
      local_(local),
      meter_(meter),
      options_(options),
      on_progress_(std::move(on_progress)),
      store_(options.store == nullptr ? nullptr : std::make_shared<MeteredStore>(options.store, link_)),
      segments_(model_, pool, local.segments, store_,
                [&budget](int64_t num_pages) { return budget.MakeRoom(num_pages, false); }),
      queue_(options.max_concurrent) {}

void PromptFetcher::Start() {
  if (store_ == nullptr) return;
  for (int i = 0; i < std::max(1, options_.num_fetch_threads); ++i) threads_.emplace_back([this] { Loop(); });
}

bool PromptFetcher::Take(const std::shared_ptr<PrefillJob>& job, size_t num_here) {
  if (store_ == nullptr || job->publish) return false;
  auto fetch =
      std::make_shared<PromptFetch>(*model_, job->policy, job->kv, std::min(num_here, job->reusable_keys().size()));
  fetch->wanted = WantedSegments(*job);
  const size_t num_chunks = job->reusable_keys().size() - fetch->first_chunk;
  if (num_chunks == 0 && fetch->wanted.empty()) return false;
  const auto length = static_cast<int32_t>(job->request.tokens.size());
  // A worker that may not compute all of the prompt needs what the store has.
  const int64_t limit = job->request.max_computed_tokens;
  fetch->by_cost = options_.fetch_by_cost && (limit == 0 || length - job->cached() <= limit);
  if (fetch->by_cost) {
    const PrefillLoad load = meter_.load(0);
    fetch->queue_s = static_cast<double>(load.queued_tokens - job->queued) / std::max(load.tokens_per_s, 1.0);
    const bool copies = job->policy->reuses_segments() && (!job->request.segments.empty() || job->request.reuse_auto);
    fetch->overlaps = !copies && job->policy->is_exact({length, static_cast<int32_t>(job->cached()), {}, {}});
    // Until the answer is there: a prompt with segments is hardly ever one that is stored from its start on.
    const FetchTimes times = TimesOf(*job, *fetch, fetch->wanted.empty() ? num_chunks : 0);
    fetch->Hold(Clock::now(), HoldFor(*fetch, times, false),
                IsWorthFetching(times) ? times.fetch_s : std::optional<double>());
  }
  job->fetch = std::move(fetch);
  if (!queue_.TryPush(job)) {
    job->fetch = nullptr;
    return false;
  }
  held_.push_back(job);
  return true;
}

PromptFetcher::Jobs PromptFetcher::TakeReady(SteadyTime now) {
  progress_.store(false, std::memory_order_relaxed);
  Jobs ready;
  for (auto it = held_.begin(); it != held_.end();) {
    PrefillJob& job = **it;
    if (!stopped_ && (!job.fetch->MayBegin(now) || ReExamine(job, now))) {
      ++it;
      continue;
    }
    job.TakeFetched(now);
    ready.push_back(*it);
    it = held_.erase(it);
  }
  return ready;
}

// A prompt whose time is over waits on if that costs nothing. Copies over a link that nobody had measured: once, by
// what has arrived by now. Chunks of its start: as long as what has arrived would have taken as long to compute as the
// prompt has waited, so that a link which then gets stuck has cost no more than the last wait.
bool PromptFetcher::ReExamine(const PrefillJob& job, SteadyTime now) const {
  PromptFetch& fetch = *job.fetch;
  if (!fetch.by_cost || fetch.over() || (fetch.looked_again && !fetch.overlaps)) return false;
  if (!fetch.reading()) return false;  // not even the answer has come
  fetch.looked_again = true;
  const int32_t num_chunks = fetch.prefix.num_expected();
  FetchTimes times = TimesOf(job, fetch, static_cast<size_t>(num_chunks));
  times.fetch_s = link_.SecondsFor(0);  // its own bytes are among the expected ones
  if (!times.fetch_s.has_value()) return false;
  const double held_s = fetch.overlaps ? HoldForBytes(times) : HoldForCopies(times);
  double waited_s = 0;
  if (fetch.overlaps) {
    const auto landed = fetch.prefix.num_bytes() / static_cast<int64_t>(ChunkPayloadBytes(*model_));
    const auto first = static_cast<int64_t>(fetch.first_chunk) + num_chunks - landed;  // the last ones come first
    const double saved_s =
        meter_.RecomputeSeconds(first * kernels::kPageTokens, static_cast<int32_t>(landed) * kernels::kPageTokens);
    waited_s = std::chrono::duration<double>(now - fetch.report().begun).count();
    if (!IsOnSchedule(times, waited_s, saved_s)) return false;
  }
  fetch.Hold(now, held_s, std::max(0.0, *times.fetch_s - waited_s));
  return held_s > 0;
}

SteadyTime PromptFetcher::next_begin() const {
  SteadyTime next = SteadyTime::max();
  for (const auto& job : held_) next = std::min(next, job->fetch->held_until());
  return next;
}

void PromptFetcher::Stop() {
  stopped_ = true;
  for (const auto& job : held_) (void)job->fetch->Close();
  queue_.Close();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void PromptFetcher::Progress() {
  progress_.store(true, std::memory_order_relaxed);
  on_progress_();
}

void PromptFetcher::Loop() {
  while (!queue_.closed()) {
    auto job = queue_.Pop(kIdleWait);
    if (job) Fetch(**job, *(*job)->fetch);
  }
}

// The job may begin, and end, while this runs: nothing of it is read here that the engine thread changes.
void PromptFetcher::Fetch(const PrefillJob& job, PromptFetch& fetch) {
  const auto start = Clock::now();
  const auto deadline = std::min(job.request.deadline, start + options_.store_timeout);
  const TraceScope trace(job.request.fetch_trace);
  fetch.Begun(start);
  if (fetch.closed()) return fetch.End(start, false);  // the prompt has ended while no thread was free
  (void)fetch_fault.Hit();
  if (fetch.by_cost) {
    ReadByCost(job, fetch, deadline);
  } else {
    const size_t num_chunks = job.reusable_keys().size() - fetch.first_chunk;
    fetch.prefix.Expect(static_cast<int32_t>(num_chunks), IncomingPrefix::Order::kForwards);
    Read(job, fetch, num_chunks, deadline);
    fetch.End(Clock::now(), false);
    Progress();
  }
}

void PromptFetcher::ReadByCost(const PrefillJob& job, PromptFetch& fetch, SteadyTime deadline) {
  const std::span<const chunk::ChunkKey> keys = job.reusable_keys().subspan(fetch.first_chunk);
  const size_t num_chunks = keys.empty() ? 0 : store_->CountLeading(keys, deadline).value_or(0);
  fetch.FoundPrefix(num_chunks);
  const FetchTimes times = TimesOf(job, fetch, num_chunks);
  const bool empty = num_chunks == 0 && fetch.wanted.empty();
  if (empty || !IsWorthFetching(times)) {
    fetch.End(Clock::now(), !empty);
    Progress();
    if (!empty) LookAround(job, fetch, num_chunks, deadline);
    return;
  }
  const LinkMeter::Expected expected(link_, BytesOf(job, fetch, num_chunks));
  fetch.prefix.Expect(static_cast<int32_t>(num_chunks),
                      fetch.overlaps ? IncomingPrefix::Order::kBackwards : IncomingPrefix::Order::kForwards);
  fetch.Hold(Clock::now(), HoldFor(fetch, times, true), times.fetch_s);
  fetch.StartReading();
  Progress();
  Read(job, fetch, num_chunks, deadline);
  fetch.End(Clock::now(), false);
  Progress();
  // The prompt was computed before enough had come to know the rate.
  if (link_.estimate().bytes_per_s <= 0)
    MeasureLink(num_chunks > 0 ? keys.first(num_chunks) : fetch.wanted[0].keys, Clock::now() + options_.store_timeout);
}

void PromptFetcher::Read(const PrefillJob& job, PromptFetch& fetch, size_t num_chunks, SteadyTime deadline) {
  const auto stop = [&] { return job.cancelled() || fetch.closed(); };
  size_t num_read = 0;
  if (num_chunks > 0) {
    const auto keys = fetch.prefix.InOrder(job.reusable_keys().subspan(fetch.first_chunk, num_chunks));
    const auto read = store_->FetchLeading(
        keys, deadline,
        [&](size_t index, const chunk::ChunkHeader& header) {
          return stop() ? chunk::Pieces() : fetch.prefix.PlaceFor(index, header);
        },
        [&](size_t index, const chunk::ChunkHeader& header) { return !stop() && fetch.prefix.Land(index, header); });
    num_read = read.value_or(0);
  }
  const std::vector<WantedSegment> wanted = WantedBehind(job, fetch, num_read);
  segments_.Fetch(wanted, *fetch.policy, deadline, stop, [&](FetchedSegments&& segments) {
    link_.NoteFound(segments.asked_tokens, segments.num_tokens);
    fetch.Deliver(std::move(segments));
  });
}

void PromptFetcher::LookAround(const PrefillJob& job, PromptFetch& fetch, size_t num_chunks, SteadyTime deadline) {
  for (const WantedSegment& wanted : WantedBehind(job, fetch, num_chunks)) {
    const auto leading = static_cast<int64_t>(store_->CountLeading(wanted.keys, deadline).value_or(0));
    const auto tokens = static_cast<int64_t>(wanted.text.size());
    const int64_t found = std::min(leading * chunk::kChunkTokens, tokens);
    link_.NoteFound(tokens, found);
    fetch.FoundSegment(found);
  }
  if (!link_.TakeProbe(kProbeAge)) return;
  MeasureLink(num_chunks > 0 ? job.reusable_keys().subspan(fetch.first_chunk, num_chunks) : fetch.wanted[0].keys,
              deadline);
}

void PromptFetcher::MeasureLink(std::span<const chunk::ChunkKey> keys, SteadyTime deadline) {
  const size_t most = std::max(kProbeChunksMin, kProbeBytes / ChunkPayloadBytes(*model_));
  std::vector<std::vector<std::byte>> scratch(std::min(most, keys.size()));
  (void)store_->FetchLeading(
      keys.first(scratch.size()), deadline,
      [&](size_t index, const chunk::ChunkHeader& header) -> chunk::Pieces {
        if (!IsOfModel(header, *model_)) return {};
        scratch[index].resize(header.payload_bytes);
        return {scratch[index]};
      },
      [](size_t, const chunk::ChunkHeader&) { return true; });
}

FetchTimes PromptFetcher::TimesOf(const PrefillJob& job, const PromptFetch& fetch, size_t num_chunks) const {
  const auto first = static_cast<int64_t>(fetch.first_chunk) * kernels::kPageTokens;
  const auto count = static_cast<int32_t>(num_chunks) * kernels::kPageTokens;
  FetchTimes times{.compute_s = meter_.RecomputeSeconds(first, count), .queue_s = fetch.queue_s};
  double copied_s = 0;
  for (const WantedSegment& wanted : WantedBehind(job, fetch, num_chunks)) {
    const PositionRange& range = job.request.segments[wanted.index].range;
    copied_s += fetch.policy->SavedByCopy() * meter_.RecomputeSeconds(range.begin, range.size());
  }
  const double stored_s = times.compute_s + link_.estimate().found_share * copied_s;
  times.compute_s += copied_s;
  if (times.compute_s > 0) times.found_share = stored_s / times.compute_s;
  times.fetch_s = link_.SecondsFor(BytesOf(job, fetch, num_chunks));
  return times;
}

int64_t PromptFetcher::BytesOf(const PrefillJob& job, const PromptFetch& fetch, size_t num_chunks) const {
  auto bytes = static_cast<int64_t>(num_chunks * ChunkPayloadBytes(*model_));
  for (const WantedSegment& wanted : WantedBehind(job, fetch, num_chunks))
    bytes += segments_.ExpectedBytes(wanted, *fetch.policy);
  return bytes;
}

double PromptFetcher::HoldFor(const PromptFetch& fetch, const FetchTimes& times, bool answered) const {
  if (!IsWorthFetching(times)) return 0;
  if (!fetch.overlaps) return HoldForCopies(times);
  return answered ? HoldForBytes(times) : HoldForAnswer(times, link_.estimate().latency_s);
}

// Segments that are not here, and worth a copy.
std::vector<WantedSegment> PromptFetcher::WantedSegments(const PrefillJob& job) const {
  std::vector<WantedSegment> wanted;
  for (size_t i = 0; i < job.segment_keys.size(); ++i) {
    const ReuseSpan& segment = job.request.segments[i];
    const std::vector<chunk::ChunkKey>& keys = job.segment_keys[i];
    if (segment.range.end <= job.cached() || segment.range.size() < kSegmentTokensMin || local_.segments.Contains(keys))
      continue;
    wanted.push_back({.index = i,
                      .text = job.text_of(segment.range),
                      .keys = keys,
                      .namespace_key = segment.namespace_key,
                      .frozen = segment.frozen,
                      .shared = segment.shared,
                      .only_whole = segment.range.begin < job.cached()});
  }
  return wanted;
}

}  // namespace spl::engine
