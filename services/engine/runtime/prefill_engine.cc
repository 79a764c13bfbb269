#include "services/engine/runtime/prefill_engine.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "services/base/check.h"
#include "services/base/fault_point.h"
#include "services/base/status.h"
#include "services/engine/cache/chunk_io.h"
#include "services/engine/cache/segment_summary.h"
#include "services/engine/methods/recovery_methods.h"
#include "services/engine/recovery/exact.h"
#include "services/engine/recovery/reuse_options.h"
#include "services/engine/runtime/local_generator.h"

namespace spl::engine {
namespace {

using Clock = std::chrono::steady_clock;

FaultPoint admit_fault("engine.prefill.admit");
FaultPoint fetch_fault("engine.prefill.fetch");
FaultPoint step_fault("engine.prefill.step");
FaultPoint begin_fault("engine.prefill.begin");

// A prompt that waited this long runs before younger, shorter ones: bounds the delay that short prompts can cause.
constexpr std::chrono::seconds kMaxDelay{2};
constexpr std::chrono::seconds kMaxPublishDelay{10};
// Upper bound of a wait without work: a safety net, every real event wakes the thread.
constexpr std::chrono::milliseconds kIdleWait{100};
constexpr int32_t kWarmUpTokens = 192;
constexpr double kSmoothing = 0.2;
// A shorter copy costs more than it saves: its edges are computed afresh anyway (docs/methods/splice.md, "Who goes with
// whom": two blocks).
constexpr int32_t kSegmentTokensMin = 32;

std::span<const int32_t> TextOf(std::span<const int32_t> tokens, const PositionRange& range) {
  return tokens.subspan(static_cast<size_t>(range.begin), static_cast<size_t>(range.size()));
}

SessionId SessionOf(const PrefillRequest& request) {
  return {request.session, request.namespace_key, request.session_owner};
}

// What of `within` is in none of the request's segments.
PositionRanges UnmarkedText(const PrefillRequest& request, PositionRange within) {
  PositionRanges marked;
  for (const ReuseSpan& segment : request.segments) marked.push_back(segment.range);
  return ComplementOf(marked, within);
}

// Of whose summaries a context notes what comes of its rows.
PositionRanges RangesOfAll(std::span<const ReuseSpan> segments) {
  PositionRanges ranges;
  for (const ReuseSpan& segment : segments) ranges.push_back(segment.range);
  return ranges;
}

double Seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

}  // namespace

struct PrefillEngine::Job {
  PrefillRequest request;
  std::optional<PublishRequest> publish;                   // a Publish call: `request` has its tokens and segments
  std::vector<chunk::ChunkKey> keys;                       // of the full chunks that may be reused or published
  std::vector<std::vector<chunk::ChunkKey>> segment_keys;  // of request.segments, where the store is asked for them
  std::unique_ptr<RecoveryPolicy> policy;
  // Of request.segments, by number: what is known by its summary, and has the KV that the policy reads, or is
  // quantized. Nobody else's.
  std::map<size_t, std::shared_ptr<const SegmentSource>> parts;
  std::vector<size_t> not_quantized;  // FetchedSegments
  std::shared_ptr<SequenceKv> kv;
  PrefillStats stats;
  std::vector<SampledToken> first_tokens;
  std::vector<float> first_logits;
  std::vector<int32_t> restored_heads;
  std::shared_ptr<const KeptTokens> kept;  // null: everything
  PositionRanges only;                     // empty: everything
  Clock::time_point submitted = Clock::now();
  Clock::time_point started{};
  double run_lookup_s = 0;         // of lookup_s, behind `started`
  std::unique_ptr<PromptRun> run;  // once the first pass is near
  int64_t queued = 0;              // its part of queued_tokens_

  double remaining() const {
    return run ? run->remaining_work() : static_cast<double>(request.tokens.size()) - static_cast<double>(cached());
  }
  int64_t cached() const { return kv ? kv->num_tokens() : 0; }
  // Nothing is missing any more that has to be waited for.
  void Begin() {
    started = Clock::now();
    stats.submitted = submitted;
    stats.started = started;
    stats.queue_s = Seconds(started - submitted) - stats.lookup_s - stats.fetch_s;
  }
  bool cancelled() const { return request.cancelled->load(std::memory_order_relaxed); }
  bool overdue(Clock::time_point now) const { return now - submitted > (behind() ? kMaxPublishDelay : kMaxDelay); }
  // What nobody waits for like for an answer.
  bool behind() const { return publish.has_value() || request.background; }
  // Whether it is this one's turn before b's, when neither or both are overdue.
  bool before(const Job& b, bool overdue, double work, double work_of_b) const {
    if (overdue) return submitted < b.submitted;
    if (behind() != b.behind()) return b.behind();
    return work < work_of_b;
  }
  // The last prompt position is always computed: its logits give the first token.
  std::span<const chunk::ChunkKey> reusable_keys() const {
    return std::span(keys).first(std::min(keys.size(), (request.tokens.size() - 1) / kernels::kPageTokens));
  }
};

PrefillEngine::PrefillEngine(std::shared_ptr<const Model> model, const KvPartitions& pool,
                             const PrefillEngineOptions& options)
    : model_(std::move(model)),
      pool_(pool, model_->backends()),
      index_(pool_, options.on_cache_change),
      segments_(model_->fingerprint(), options.on_cache_change),
      sessions_(static_cast<int64_t>(options.session_share * static_cast<double>(pool_.num_pages())),
                options.session_lease),
      options_(options),
      cost_(model_->config()),
      canonical_(model_, pool_, segments_,
                 {.max_queued = options.max_canonical_queued,
                  .make_room = [this](int64_t num_pages) { return MakeRoom(num_pages, false); },
                  .on_computed =
                      [this](const CanonicalTask& task, const auto& source) {
                        OfferSegment(source, task.keys, task.namespace_key, task.quantized);
                      },
                  .on_change =
                      [this] {
                        std::lock_guard lock(mutex_);
                        idle_.notify_all();
                      }}),
      fetcher_(model_, pool_, segments_, options.store,
               [this](int64_t num_pages) { return MakeRoom(num_pages, false); }),
      fetch_queue_(options.max_concurrent) {}

absl::StatusOr<std::unique_ptr<PrefillEngine>> PrefillEngine::Create(std::shared_ptr<const Model> model,
                                                                     const KvPartitions& pool,
                                                                     const PrefillEngineOptions& options) {
  if (options.executor.max_rows % kernels::kPageTokens != 0)
    return InvalidArgument("prefill: the slice of {} tokens is not a multiple of {}", options.executor.max_rows,
                           kernels::kPageTokens);
  auto engine = std::unique_ptr<PrefillEngine>(new PrefillEngine(std::move(model), pool, options));
  ExecutorOptions executor = options.executor;
  executor.max_sequences = static_cast<int32_t>(options.max_concurrent);
  executor.max_span_rows = static_cast<int32_t>(engine->max_prompt_tokens());
  SPLICE_ASSIGN_OR_RETURN(engine->executor_, ParallelExecutor::Create(engine->model_, pool, executor));
  SPLICE_RETURN_IF_ERROR(engine->WarmUp());
  PrefillEngine* self = engine.get();
  engine->engine_thread_ = std::thread([self] { self->RunLoop(); });
  if (options.store) {
    for (int i = 0; i < std::max(1, options.num_fetch_threads); ++i)
      engine->fetch_threads_.emplace_back([self] { self->FetchLoop(); });
    engine->publisher_ = std::make_unique<ChunkPublisher>(
        engine->model_,
        ChunkPublisherOptions{
            .store = options.store,
            .offer_timeout = options.store_timeout,
            .order_timeout = options.publish_timeout,
            .max_offers = options.max_publish_queued,
            .max_orders = options.max_publish_calls,
            .order_threads = std::clamp<size_t>(std::thread::hardware_concurrency() / 4, 2, 4),
            .recompute_seconds = [self](int64_t first, int32_t count) { return self->RecomputeSeconds(first, count); },
            .on_released = [self] { self->Wake(); }});
  }
  return engine;
}

PrefillEngine::~PrefillEngine() { SPLICE_CHECK(!engine_thread_.joinable(), "Stop() was not called"); }

// Runs a short prompt twice: the first pass builds kernels and touches memory, the second gives a first speed.
absl::Status PrefillEngine::WarmUp() {
  const ModelConfig& config = model_->config();
  const int32_t length = std::min({kWarmUpTokens, config.max_positions - 1, executor_->max_rows()});
  const std::vector<int32_t> tokens(length, 0);
  std::vector<int32_t> positions(length);
  std::iota(positions.begin(), positions.end(), 0);
  ExactPolicy policy(config);
  SequenceKv kv(pool_, KvShapeOf(config));
  if (!kv.Reserve(length).ok())
    return InvalidArgument("prefill: a pool of {} pages is too small for {} tokens of this model", pool_.num_pages(),
                           length);
  for (int pass = 0; pass < 2; ++pass) {
    const auto start = Clock::now();
    const PrefillSlice slice{tokens, positions, &kv, &policy};
    SPLICE_RETURN_IF_ERROR(executor_->Prefill({&slice, 1}));
    const double seconds = std::max(1e-6, Seconds(Clock::now() - start));
    tokens_per_s_ = length / seconds;
    cost_per_s_ = cost_.Of(0, length) / seconds;
  }
  return absl::OkStatus();
}

int64_t PrefillEngine::max_prompt_tokens() const {
  const int64_t pages = pool_.num_pages() / KvShapeOf(model_->config()).num_streams();
  return std::min<int64_t>(model_->config().max_positions - 1, pages * kernels::kPageTokens);
}

// What Submit and Publish ask of a prompt alike.
absl::Status PrefillEngine::CheckPrompt(std::span<const int32_t> tokens, std::span<const ReuseSpan> segments) const {
  SPLICE_RETURN_IF_ERROR(ValidatePrompt(tokens, model_->config()));
  const auto length = static_cast<int64_t>(tokens.size());
  if (length > max_prompt_tokens())
    return InvalidArgument("the prompt has {} tokens; the prefill worker's KV pool holds {}", length,
                           max_prompt_tokens());
  int32_t end = 0;
  for (const ReuseSpan& segment : segments) {
    if (segment.range.begin < end || segment.range.size() <= 0 || segment.range.end > length)
      return InvalidArgument("segment [{}, {}) behind position {} in a prompt of {} tokens", segment.range.begin,
                             segment.range.end, end, length);
    end = segment.range.end;
  }
  return absl::OkStatus();
}

absl::Status PrefillEngine::Submit(PrefillRequest request) {
  const ModelConfig& config = model_->config();
  SPLICE_RETURN_IF_ERROR(CheckPrompt(request.tokens, request.segments));
  SPLICE_RETURN_IF_ERROR(ValidateSampling(request.sampling, config.vocab_size));
  const int64_t length = static_cast<int64_t>(request.tokens.size());
  if (request.num_output_tokens < 0 || request.num_output_tokens >= length)
    return InvalidArgument("num_output_tokens is {}, the prompt has {} tokens", request.num_output_tokens, length);
  SPLICE_RETURN_IF_ERROR(CheckSessionName(request.session));
  if (request.reuse.policy.empty() || request.reuse.policy == "auto")
    request.reuse.policy =
        request.segments.empty() && !request.reuse_auto ? "exact" : DefaultReusePolicy(model_->head_classes().get());
  auto job = std::make_shared<Job>();
  SPLICE_ASSIGN_OR_RETURN(job->policy, MakeRecoveryPolicy(request.reuse, config, model_->head_classes().get()));
  if (request.segments.size() > static_cast<size_t>(job->policy->max_segments()))
    return InvalidArgument("segments has {} entries; reuse policy '{}' takes at most {}", request.segments.size(),
                           job->policy->name(), job->policy->max_segments());
  if (options_.store && job->policy->reuses_segments()) {
    for (const ReuseSpan& segment : request.segments)
      job->segment_keys.push_back(segments_.KeysOf(segment.namespace_key, TextOf(request.tokens, segment.range)));
  }
  job->request = std::move(request);
  return Enqueue(std::move(job));
}

absl::Status PrefillEngine::Publish(PublishRequest request) {
  if (publisher_ == nullptr)
    return Errorf(absl::StatusCode::kFailedPrecondition,
                  "the prefill worker has no chunk store to publish to; start it with --store");
  if (request.segments.empty()) return InvalidArgument("segments is empty: nothing of the context would be stored");
  SPLICE_RETURN_IF_ERROR(CheckPrompt(request.tokens, request.segments));
  auto job = std::make_shared<Job>();
  job->policy = std::make_unique<ExactPolicy>(model_->config(), RangesOfAll(request.segments));
  job->request.id = request.id;
  job->request.tokens = std::move(request.tokens);
  job->request.segments = request.segments;
  // A context has no namespace of its own; whoever may name its first segment's may share its start.
  job->request.namespace_key = request.segments[0].namespace_key;
  job->request.deadline = request.deadline;
  job->request.cancelled = request.cancelled;
  job->publish = std::move(request);
  return Enqueue(std::move(job));
}

absl::Status PrefillEngine::Enqueue(std::shared_ptr<Job> job) {
  const auto length = static_cast<int64_t>(job->request.tokens.size());
  job->stats.policy = std::string(job->policy->name());
  job->stats.prompt_tokens = length;
  job->queued = length;
  if (options_.prefix_cache)
    job->keys = chunk::MakePrefixKeys(model_->fingerprint(), job->request.namespace_key, job->request.tokens);
  std::lock_guard lock(mutex_);
  if (stopping_) return absl::UnavailableError("the prefill worker is stopping");
  if (num_jobs_ >= options_.max_queued)
    return Errorf(absl::StatusCode::kResourceExhausted, "the prefill queue is full ({} requests)", num_jobs_);
  if (job->publish && num_publishes_ >= options_.max_publish_calls)
    return Errorf(absl::StatusCode::kResourceExhausted, "{} contexts are being published, at most {}; try again",
                  num_publishes_, options_.max_publish_calls);
  ++num_jobs_;
  num_publishes_ += job->publish ? 1 : 0;
  queued_tokens_ += length;
  inbox_.push_back(std::move(job));
  woken_ = true;
  wake_.notify_one();
  return absl::OkStatus();
}

void PrefillEngine::Wake() {
  std::lock_guard lock(mutex_);
  woken_ = true;
  wake_.notify_one();
}

PrefillLoad PrefillEngine::load() const {
  std::lock_guard lock(mutex_);
  return {num_jobs_, queued_tokens_, tokens_per_s_};
}

void PrefillEngine::WaitIdle(SteadyTime deadline) const {
  std::unique_lock lock(mutex_);
  idle_.wait_until(lock, deadline, [&] { return num_jobs_ == 0; });
}

bool PrefillEngine::WaitBackgroundIdle(SteadyTime deadline) const {
  std::unique_lock lock(mutex_);
  return idle_.wait_until(lock, deadline, [&] { return num_jobs_ == 0 && canonical_.stats().num_queued == 0; });
}

void PrefillEngine::Stop() {
  {
    std::lock_guard lock(mutex_);
    if (stopping_ && !engine_thread_.joinable()) return;
    stopping_ = true;
    wake_.notify_one();
  }
  fetch_queue_.Close();
  for (std::thread& thread : fetch_threads_) thread.join();
  fetch_threads_.clear();
  if (engine_thread_.joinable()) engine_thread_.join();
  if (publisher_) publisher_->Stop();
}

void PrefillEngine::RunLoop() {
  while (true) {
    {
      std::unique_lock lock(mutex_);
      if (running_.empty() && !CanStepCanonical()) wake_.wait_for(lock, kIdleWait, [&] { return woken_ || stopping_; });
      woken_ = false;
      if (stopping_) break;
    }
    CollectInbox();
    DropDead();
    sessions_.Expire(Clock::now());
    if (!waiting_.empty() || !running_.empty() || num_fetching_ > 0) canonical_.Cancel();
    AdmitWaiting();
    if (!running_.empty()) {
      RunStep();
    } else if (CanStepCanonical()) {
      StepCanonical();
    }
  }
  canonical_.Stop();
  CollectInbox();
  // The fetch threads have ended (Stop joins them first), so nothing else holds a job.
  while (auto job = fetch_queue_.TryPop()) waiting_.push_back(*job);
  waiting_.insert(waiting_.end(), running_.begin(), running_.end());
  running_.clear();
  for (const auto& job : waiting_) FinishJob(job, absl::UnavailableError("the prefill worker is stopping"));
  waiting_.clear();
}

void PrefillEngine::CollectInbox() {
  std::lock_guard lock(mutex_);
  waiting_.insert(waiting_.end(), inbox_.begin(), inbox_.end());
  inbox_.clear();
  for (auto& job : fetched_) {
    --num_fetching_;
    job->Begin();
    running_.push_back(std::move(job));
  }
  fetched_.clear();
}

// Ends what was cancelled or is past its deadline. What is being fetched is looked at when it comes back.
void PrefillEngine::DropDead() {
  const auto now = Clock::now();
  const auto sweep = [&](auto& list) {
    for (auto it = list.begin(); it != list.end();) {
      const std::shared_ptr<Job> job = *it;
      if (!job->cancelled() && now < job->request.deadline) {
        ++it;
        continue;
      }
      it = list.erase(it);
      FinishJob(job, job->cancelled() ? absl::CancelledError("the request was cancelled")
                                      : absl::DeadlineExceededError("the deadline passed before the prompt was done"));
    }
  };
  sweep(waiting_);
  sweep(running_);
}

void PrefillEngine::AdmitWaiting() {
  // Shortest prompt first among those that are not overdue, as in ChooseBatch.
  const auto now = Clock::now();
  std::stable_sort(waiting_.begin(), waiting_.end(), [&](const auto& a, const auto& b) {
    const bool overdue_a = a->overdue(now), overdue_b = b->overdue(now);
    if (overdue_a != overdue_b) return overdue_a;
    return a->before(*b, overdue_a, static_cast<double>(a->request.tokens.size()),
                     static_cast<double>(b->request.tokens.size()));
  });
  while (!waiting_.empty() && running_.size() + num_fetching_ < options_.max_concurrent) {
    if (!Admit(waiting_.front())) {
      canonical_.DropQueued();  // pages are short: nothing is computed that nobody has asked for
      break;
    }
    waiting_.pop_front();
  }
}

// Finds cached chunks and reserves pages for the rest. False when pages are short: the job keeps waiting.
bool PrefillEngine::Admit(const std::shared_ptr<Job>& job) {
  const auto start = Clock::now();
  auto kv = std::make_shared<SequenceKv>(pool_, KvShapeOf(model_->config()));
  const int64_t length = static_cast<int64_t>(job->request.tokens.size());
  AppendKept(*job, *kv);
  const auto hits = static_cast<size_t>(kv->num_pages_per_stream());
  const int64_t needed = PagesForTokens(model_->config(), length) - kv->num_pages();
  if (!MakeRoom(needed, job->overdue(start) || !PagesWillReturn())) return false;
  if (!kv->Reserve(length).ok()) return false;  // another thread was faster
  job->kv = std::move(kv);
  job->stats.cached_tokens = job->cached();
  job->stats.looked_up = start;
  (void)admit_fault.Hit();
  job->stats.lookup_s = Seconds(Clock::now() - start);
  if (options_.store && !job->publish && (hits < job->reusable_keys().size() || !WantedSegments(*job).empty()) &&
      fetch_queue_.TryPush(job)) {
    ++num_fetching_;
  } else {
    job->Begin();
    running_.push_back(job);
  }
  return true;
}

// The leading pages of the prompt that are here: exact ones of any prompt, or, where they are more, those of the
// conversation's last turn.
void PrefillEngine::AppendKept(Job& job, SequenceKv& kv) {
  const PrefillRequest& request = job.request;
  const std::span<const chunk::ChunkKey> keys = job.reusable_keys();
  job.stats.session_tokens = 0;
  if (!request.session.empty()) {
    const SessionTable::Match match =
        sessions_.Find(SessionOf(request), request.tokens, MethodOf(request.reuse), Clock::now());
    if (match.num_pages > static_cast<int64_t>(index_.CountLeading(keys))) {
      kv.AppendLeading(*match.kv, match.num_pages);
      job.stats.session_tokens = kv.num_tokens();
      return;
    }
  }
  index_.AppendLeading(keys, kv);
}

// Segment sources, sessions and prefix entries share pages, so a page is free when all let go of it. What a
// conversation holds under its lease goes behind what nobody has a claim to; frozen sources go last, but first while
// they hold more than their share. Any thread.
bool PrefillEngine::MakeRoom(int64_t num_pages, bool may_drop_frozen) {
  const auto frozen_max = static_cast<int64_t>(options_.frozen_share * static_cast<double>(pool_.num_pages()));
  while (pool_.num_free() < num_pages) {
    if (segments_.frozen_pages() > frozen_max && segments_.EvictFrozen()) continue;
    if (index_.EvictUntilFree(num_pages)) break;
    if (options_.reclaim && options_.reclaim()) continue;
    if (!segments_.EvictOne() && !sessions_.EvictOne() && !(may_drop_frozen && segments_.EvictFrozen())) return false;
  }
  return true;
}

// Whether somebody works with pages that will be free soon: no reason to drop what was meant to stay.
bool PrefillEngine::PagesWillReturn() {
  std::erase_if(handed_out_, [](const auto& kv) { return kv.expired(); });
  return !running_.empty() || num_fetching_ > 0 || !handed_out_.empty() || (publisher_ && publisher_->busy());
}

void PrefillEngine::FetchLoop() {
  while (!fetch_queue_.closed()) {
    auto job = fetch_queue_.Pop(kIdleWait);
    if (!job) continue;
    Fetch(**job);
    std::lock_guard lock(mutex_);
    fetched_.push_back(std::move(*job));
    woken_ = true;
    wake_.notify_one();
  }
}

// Brings what the store has. A store that fails costs time, never a request.
void PrefillEngine::Fetch(Job& job) {
  const auto start = Clock::now();
  const auto deadline = std::min(job.request.deadline, start + options_.store_timeout);
  const TraceScope trace(job.request.fetch_trace);
  job.stats.fetched = start;
  (void)fetch_fault.Hit();
  FetchPrefix(job, deadline);
  FetchedSegments fetched = fetcher_.Fetch(WantedSegments(job), *job.policy, deadline, [&] { return job.cancelled(); });
  job.stats.fetched_bytes += fetched.num_bytes;
  job.parts = std::move(fetched.parts);
  job.not_quantized = std::move(fetched.not_quantized);
  job.stats.fetch_s = Seconds(Clock::now() - start);
}

// The leading chunks of the prompt, into the job's pages.
void PrefillEngine::FetchPrefix(Job& job, SteadyTime deadline) {
  const int64_t cached = job.cached();
  const size_t first = static_cast<size_t>(cached / kernels::kPageTokens);
  const std::span<const chunk::ChunkKey> keys = job.reusable_keys().subspan(first);
  if (keys.empty()) return;
  const FetchedPrefix fetched = engine::FetchPrefix(*options_.store, keys, static_cast<int32_t>(first), *model_,
                                                    *job.kv, deadline, [&] { return job.cancelled(); });
  job.stats.fetched_bytes += fetched.num_bytes;
  job.kv->set_num_tokens(cached + int64_t{fetched.num_chunks} * kernels::kPageTokens);
  job.stats.stored_tokens = job.cached() - cached;
  job.stats.cached_tokens = job.cached();
}

// Segments that are not here, and worth a copy.
std::vector<WantedSegment> PrefillEngine::WantedSegments(const Job& job) const {
  std::vector<WantedSegment> wanted;
  for (size_t i = 0; i < job.segment_keys.size(); ++i) {
    const ReuseSpan& segment = job.request.segments[i];
    const std::vector<chunk::ChunkKey>& keys = job.segment_keys[i];
    if (segment.range.end <= job.cached() || segment.range.size() < kSegmentTokensMin || segments_.Contains(keys))
      continue;
    wanted.push_back({.index = i,
                      .text = TextOf(job.request.tokens, segment.range),
                      .keys = keys,
                      .namespace_key = segment.namespace_key,
                      .frozen = segment.frozen,
                      .shared = segment.shared,
                      .only_whole = segment.range.begin < job.cached()});
  }
  return wanted;
}

// What was computed for want of a summary in the store is there from now on.
void PrefillEngine::OfferSummaries(const Job& job) {
  if (publisher_ == nullptr || !options_.publish || job.stats.summaries_computed == 0) return;
  for (const ReuseSpan& segment : job.request.segments) {
    const std::shared_ptr<const SegmentSource> source = WholeSourceOf(job, segment);
    if (source == nullptr) continue;
    const std::shared_ptr<const SegmentSummary> summary = source->summary();
    if (summary == nullptr || summary->local_query.empty()) continue;
    std::vector<chunk::ChunkKey> keys = segments_.KeysOf(segment.namespace_key, source->tokens());
    const size_t num_chunks = keys.size();  // which are published with the segment
    (void)publisher_->Offer({nullptr, source, std::move(keys), segment.namespace_key, num_chunks});
  }
}

// All KV was fetched for want of quantized copies: the next worker finds some.
void PrefillEngine::OfferQuantized(const Job& job) {
  if (publisher_ == nullptr || !options_.publish || !options_.quantize_published) return;
  for (const size_t i : job.not_quantized) {
    const ReuseSpan& segment = job.request.segments[i];
    if (auto source = WholeSourceOf(job, segment); source != nullptr)
      OfferSegment(std::move(source), job.segment_keys[i], segment.namespace_key, true);
  }
}

// The source that is this segment and nothing else; null: there is none.
std::shared_ptr<const SegmentSource> PrefillEngine::WholeSourceOf(const Job& job, const ReuseSpan& segment) {
  const auto hits = segments_.FindSegment(segment.namespace_key, job.request.tokens, segment.range);
  const auto length = static_cast<size_t>(segment.range.size());
  if (hits.size() != 1 || static_cast<size_t>(hits[0].num_tokens) != length ||
      hits[0].source->tokens().size() != length)
    return nullptr;
  return hits[0].source;
}

// To the store, which takes what it has not.
void PrefillEngine::OfferSegment(std::shared_ptr<const SegmentSource> source, std::vector<chunk::ChunkKey> keys,
                                 const chunk::Digest& namespace_key, bool quantized) {
  if (publisher_ == nullptr || !options_.publish) return;
  (void)publisher_->Offer({.kv = nullptr,
                           .source = std::move(source),
                           .keys = std::move(keys),
                           .namespace_key = namespace_key,
                           .quantized = quantized && options_.quantize_published});
}

std::vector<std::shared_ptr<PrefillEngine::Job>> PrefillEngine::ChooseBatch() {
  const auto now = Clock::now();
  std::vector<std::shared_ptr<Job>> order(running_.begin(), running_.end());
  std::stable_sort(order.begin(), order.end(), [&](const auto& a, const auto& b) {
    const bool overdue_a = a->overdue(now), overdue_b = b->overdue(now);
    if (overdue_a != overdue_b) return overdue_a;
    return a->before(*b, overdue_a, a->remaining(), b->remaining());
  });
  return order;
}

// What of the prompt's segments, and of its other text where the request says so, has KV in the local pages. The prefix
// is exact and wins; what is left of a segment behind it must be worth a copy (docs/methods/splice.md, "Who goes with
// whom").
std::vector<SegmentHit> PrefillEngine::FindSegments(const Job& job) {
  if (!job.policy->reuses_segments()) return {};
  const PrefillRequest& request = job.request;
  const auto length = static_cast<int32_t>(request.tokens.size()), prefix = static_cast<int32_t>(job.cached());
  std::vector<SegmentHit> hits;
  for (size_t i = 0; i < request.segments.size(); ++i) {
    const ReuseSpan& segment = request.segments[i];
    if (segment.range.end <= prefix) continue;
    if (const auto part = job.parts.find(i); part != job.parts.end()) {
      hits.push_back({part->second, 0, segment.range.begin, segment.range.size(), segment.shared});
      continue;
    }
    auto found = segments_.FindSegment(segment.namespace_key, request.tokens, segment.range, segment.frozen);
    if (segment.shared) {
      // A router that does not know shared namespaces may have left a source that stood behind other text; a text
      // inside of a source has seen what its caller put in front of it.
      std::erase_if(found, [](const SegmentHit& hit) { return !hit.source->isolated(); });
      for (SegmentHit& hit : found) hit.shared = true;
      hits.insert(hits.end(), found.begin(), found.end());
      continue;
    }
    hits.insert(hits.end(), found.begin(), found.end());
    const int32_t rest = found.empty() ? segment.range.begin : found.back().target + found.back().num_tokens;
    const auto more =
        segments_.FindText(segment.namespace_key, request.tokens, {std::max(rest, prefix), segment.range.end});
    hits.insert(hits.end(), more.begin(), more.end());
  }
  if (request.reuse_auto) {
    for (const PositionRange& range : UnmarkedText(request, {prefix, length})) {
      const auto found = segments_.FindText(request.namespace_key, request.tokens, range);
      hits.insert(hits.end(), found.begin(), found.end());
    }
    std::sort(hits.begin(), hits.end(), [](const SegmentHit& a, const SegmentHit& b) { return a.target < b.target; });
  }
  for (SegmentHit& hit : hits) {
    const int32_t cut = std::clamp(prefix - hit.target, 0, hit.num_tokens);
    hit.offset += cut;
    hit.target += cut;
    hit.num_tokens -= cut;
  }
  std::erase_if(hits, [](const SegmentHit& hit) { return hit.num_tokens < kSegmentTokensMin; });
  return hits;
}

absl::Status PrefillEngine::StartRun(Job& job) {
  const auto start = Clock::now();
  job.run = std::make_unique<PromptRun>(job.request.tokens, FindSegments(job), *job.kv, *job.policy);
  job.stats.exact = job.run->exact();
  job.stats.aligned_tokens = job.run->reused_tokens();
  job.stats.computed_tokens = job.stats.prompt_tokens - job.stats.cached_tokens - job.stats.aligned_tokens;
  const int64_t most = job.request.max_computed_tokens;
  if (most > 0 && job.stats.computed_tokens > most)
    return Errorf(absl::StatusCode::kResourceExhausted,
                  "{} tokens of the prompt have no KV here, this worker computes at most {}", job.stats.computed_tokens,
                  most);
  SPLICE_RETURN_IF_ERROR(begin_fault.Hit().status);
  SPLICE_RETURN_IF_ERROR(job.run->Begin(*executor_));
  job.run_lookup_s = Seconds(Clock::now() - start);
  job.stats.lookup_s += job.run_lookup_s;
  if (job.request.on_layer && job.cached() > 0) {
    for (int32_t layer = 0; layer < model_->config().num_layers; ++layer)
      job.request.on_layer({job.kv, layer, 0, PagesFor(job.cached()), nullptr, nullptr});
  }
  std::lock_guard lock(mutex_);
  const auto work = static_cast<int64_t>(std::ceil(job.run->remaining_work()));
  queued_tokens_ += work - job.queued;
  job.queued = work;
  return absl::OkStatus();
}

void PrefillEngine::RunStep() {
  const StepTurns::Turn turn = StepTurns::TakeOf(options_.turns.get());
  const auto start = Clock::now();
  (void)step_fault.Hit();
  std::vector<std::shared_ptr<Job>> batch;
  std::vector<PrefillSlice> slices;
  PassLayers layers;
  int32_t room = executor_->max_rows();
  for (const auto& job : ChooseBatch()) {
    if (job->run == nullptr) {
      if (const absl::Status started = StartRun(*job); !started.ok()) {
        FailAll({job}, started);
        if (IsDeviceLost(started)) return;
        continue;  // the others of the step do not depend on it
      }
    }
    if (!batch.empty() && (job->run->alone() || job->run->layers() != layers)) continue;
    const PrefillSlice slice = job->run->Next(room);
    if (slice.tokens.empty()) continue;
    // Known before the first page is final.
    if (const auto kept = job->run->kept(); !kept.empty() && job->kept == nullptr)
      job->kept = std::make_shared<KeptTokens>(
          KeptTokens{static_cast<int32_t>(job->request.tokens.size()), {kept.begin(), kept.end()}});
    layers = job->run->layers();
    slices.push_back(slice);
    batch.push_back(job);
    room -= static_cast<int32_t>(slice.tokens.size());
    if (job->run->alone()) break;
  }
  if (batch.empty()) return;
  const auto on_layer = [&](int32_t layer) {
    bool any_alive = false;
    const std::shared_ptr<const kernels::Fence> fence = executor_->RecordFence();
    for (const auto& job : batch) {
      any_alive |= !job->cancelled();
      const auto [first, end] = job->run->final_pages();
      if (job->request.on_layer && first < end)
        job->request.on_layer({job->kv, layer, first, end - first, fence, job->kept});
    }
    return any_alive;
  };
  absl::Status status = executor_->Prefill(slices, layers, on_layer);
  if (status.code() == absl::StatusCode::kCancelled) return;  // DropDead ends them

  // Logits of the prompts that are complete now, in one product.
  std::vector<int32_t> last_rows;
  std::vector<std::shared_ptr<Job>> complete, published;
  int32_t row = 0;
  double work = 0, cost = 0;
  for (size_t i = 0; i < batch.size() && status.ok(); ++i) {
    Job& job = *batch[i];
    row += static_cast<int32_t>(slices[i].tokens.size());
    work += job.run->pass_work();
    cost += cost_.Of(slices[i].positions, layers.layers.begin, layers.layers.end);
    UpdateLoad(job, job.run->pass_work());
    status = job.run->Finish(*executor_);
    if (!status.ok() || !job.run->done()) continue;
    job.stats.recomputed_tokens = job.run->recomputed_tokens();
    job.stats.ffn_share = job.run->ffn_share();
    job.restored_heads = job.run->restored_heads();
    job.stats.kept_share = job.run->kept_share();
    job.only = job.run->only();
    job.stats.summaries_computed = job.run->summaries_computed();
    job.stats.restored_heads = static_cast<int64_t>(job.restored_heads.size());
    job.stats.lines = job.run->lines();
    if (job.publish) {
      published.push_back(batch[i]);
    } else {
      last_rows.push_back(row - 1);
      complete.push_back(batch[i]);
    }
  }
  if (!status.ok()) return FailAll(batch, status);
  if (options_.turns != nullptr) {
    // The device has done the slice when another engine's turn comes.
    if (const std::shared_ptr<const kernels::Fence> fence = executor_->RecordFence(); fence != nullptr)
      status = fence->Wait();
    if (!status.ok()) return FailAll(batch, status);
  }
  UpdateRate(work, cost, Seconds(Clock::now() - start));
  for (const auto& job : published) {
    running_.remove(job);
    FinishJob(job, absl::OkStatus());
  }
  if (complete.empty()) return;
  status = executor_->ComputeLogits(last_rows);
  if (status.ok()) status = SampleFirstTokens(complete);
  if (!status.ok()) return FailAll(complete, status);
  for (const auto& job : complete) {
    running_.remove(job);
    FinishJob(job, absl::OkStatus());
  }
}

// Ends the batch; and everything else, too, when the device is lost.
void PrefillEngine::FailAll(const std::vector<std::shared_ptr<Job>>& batch, const absl::Status& failed) {
  const bool lost = IsDeviceLost(failed);
  const absl::Status ended = lost ? absl::UnavailableError(MessageOf(failed)) : failed;
  for (const auto& job : batch) {
    running_.remove(job);
    FinishJob(job, ended);
  }
  if (!lost) return;
  for (const auto& job : waiting_) FinishJob(job, ended);
  waiting_.clear();
  while (!running_.empty()) {
    const auto job = running_.front();
    running_.pop_front();
    FinishJob(job, ended);
  }
  options_.on_device_lost(failed);
}

absl::Status PrefillEngine::SampleFirstTokens(std::span<const std::shared_ptr<Job>> jobs) {
  std::vector<std::vector<Sampler>> samplers;
  for (const auto& job : jobs) {
    const std::span<const int32_t> tokens(job->request.tokens);
    const size_t prior = job->request.num_output_tokens;
    samplers.push_back(ForkSamplers(job->request.sampling, model_->config().eos_ids,
                                    tokens.first(tokens.size() - prior), tokens.last(prior),
                                    model_->config().max_positions));
  }
  SPLICE_ASSIGN_OR_RETURN(auto sampled, row_sampler_.SampleFirst(*executor_, samplers));
  for (size_t i = 0, vocab = model_->config().vocab_size; i < jobs.size(); ++i) {
    jobs[i]->first_tokens = std::move(sampled[i]);
    if (!jobs[i]->request.return_first_logits) continue;
    SPLICE_ASSIGN_OR_RETURN(const std::span<const float> logits, executor_->Logits());
    jobs[i]->first_logits.assign(logits.begin() + i * vocab, logits.begin() + (i + 1) * vocab);
  }
  return absl::OkStatus();
}

// What a context that is published notes of its segments on the way.
void PrefillEngine::KeepLocalSummary(const Job& job, const PositionRange& segment, const SegmentSource& source) {
  if (!job.publish) return;
  const auto& computed = static_cast<const ExactPolicy&>(*job.policy);  // Publish made it
  source.KeepSummary(computed.LocalSummaryOf(segment));
}

// Offers what is exact to later requests: the prompt from its start, and its segments wherever they stand. KV behind
// the first copy is approximate and stays private (docs/methods/provenance.md).
void PrefillEngine::Index(const Job& job) {
  const SequenceKv& kv = *job.kv;
  const std::span<const int32_t> tokens = job.request.tokens;
  if (options_.prefix_cache) {
    index_.Insert(job.keys, kv);
    const auto exact = std::min(job.keys.size(), static_cast<size_t>(kv.exact_tokens() / kernels::kPageTokens));
    const auto known = static_cast<size_t>(job.stats.cached_tokens / kernels::kPageTokens);
    if (publisher_ && options_.publish && !job.publish && known < exact)
      (void)publisher_->Offer({job.kv,
                               nullptr,
                               {job.keys.begin(), job.keys.begin() + static_cast<int64_t>(exact)},
                               job.request.namespace_key,
                               known});
  }
  std::vector<ReuseSpan> offered = job.request.segments;
  if (job.request.reuse_auto) {
    for (const PositionRange& range : UnmarkedText(job.request, {0, static_cast<int32_t>(tokens.size())}))
      offered.push_back({range, job.request.namespace_key});
  }
  const auto prompt = offered.empty() ? nullptr : std::make_shared<const std::vector<int32_t>>(job.request.tokens);
  for (const ReuseSpan& segment : offered) {
    if (segment.shared) continue;  // its source is computed by itself (NoteMissingSegments)
    const auto end = std::min<int32_t>(segment.range.end, static_cast<int32_t>(kv.exact_tokens()));
    if (end - segment.range.begin < std::min(segment.range.size(), chunk::kChunkTokens) || end <= segment.range.begin)
      continue;
    const auto text = TextOf(tokens, {segment.range.begin, end});
    auto source = std::make_shared<SegmentSource>(kv, segment.range.begin, text, segment.range.begin == 0, prompt);
    KeepLocalSummary(job, segment.range, *source);
    if (segments_.Insert(segment.namespace_key, source, segment.frozen) && !job.publish)
      OfferSegment(source, segments_.KeysOf(segment.namespace_key, text), segment.namespace_key,
                   job.policy->ReadsQuantized());
  }
}

// Pages of its own, so that the sequence that was handed out ends when its push does. What a policy left out, a next
// turn would take for seen: such a prompt stays with its request.
void PrefillEngine::KeepSession(const Job& job) {
  const PrefillRequest& request = job.request;
  if (request.session.empty() || job.kept != nullptr || !job.only.empty()) return;
  auto kept = std::make_shared<SequenceKv>(pool_, KvShapeOf(model_->config()));
  kept->AppendLeading(*job.kv, static_cast<int32_t>(job.kv->num_tokens() / kernels::kPageTokens));
  sessions_.Keep(SessionOf(request), request.tokens, MethodOf(request.reuse), std::move(kept), Clock::now());
}

// Remembers what the request's segments lack. What stood behind a copy has no source, and what has one is not computed
// again.
void PrefillEngine::NoteMissingSegments(const Job& job) {
  if (!options_.canonical_prefill) return;
  for (size_t i = 0; i < job.request.segments.size(); ++i) {
    const ReuseSpan& segment = job.request.segments[i];
    if (segment.range.size() < kSegmentTokensMin || job.parts.contains(i)) continue;  // the store has it
    const auto text = TextOf(job.request.tokens, segment.range);
    std::vector<chunk::ChunkKey> keys = segments_.KeysOf(segment.namespace_key, text);
    if (segments_.Contains(keys)) continue;
    canonical_.Add({segment.namespace_key,
                    {text.begin(), text.end()},
                    std::move(keys),
                    segment.frozen,
                    job.policy->ReadsQuantized()});
  }
}

// Engine thread.
bool PrefillEngine::CanStepCanonical() const {
  return running_.empty() && waiting_.empty() && num_fetching_ == 0 && canonical_.has_work();
}

bool PrefillEngine::WorkArrived() const {
  std::lock_guard lock(mutex_);
  return !inbox_.empty() || !fetched_.empty() || stopping_;
}

// One slice, or the part of it until a request comes.
void PrefillEngine::StepCanonical() {
  const absl::StatusOr<CanonicalPrefill::Pass> pass = canonical_.Step(*executor_, [this] { return WorkArrived(); });
  if (!pass.ok()) return FailAll({}, pass.status());
  if (pass->work > 0) UpdateRate(pass->work, pass->cost, pass->seconds);
}

void PrefillEngine::FinishJob(const std::shared_ptr<Job>& job, const absl::Status& status) {
  if (job->started != Clock::time_point{})
    job->stats.prefill_s = Seconds(Clock::now() - job->started) - job->run_lookup_s;
  {
    std::lock_guard lock(mutex_);
    queued_tokens_ -= job->queued;
    job->queued = 0;
  }
  if (status.ok() && job->request.publish) {
    Index(*job);
    KeepSession(*job);
    NoteMissingSegments(*job);
    OfferSummaries(*job);
    OfferQuantized(*job);
  }
  job->run.reset();  // gives its sources back
  job->parts.clear();
  if (job->publish) {
    const absl::Status ordered = status.ok() ? Order(job) : status;
    if (!ordered.ok()) EndPublish(*job, ordered, {});
    return;
  }
  if (job->kv) handed_out_.push_back(job->kv);
  PrefillOutcome outcome{
      std::move(job->first_tokens),   std::move(job->kv),   job->stats,          std::move(job->first_logits),
      std::move(job->restored_heads), std::move(job->kept), std::move(job->only)};
  if (!status.ok()) outcome.first_tokens.clear();
  job->request.on_done(status, std::move(outcome));
  std::lock_guard lock(mutex_);
  --num_jobs_;
  idle_.notify_all();
}

// Hands the computed segments to the publisher. They are exact: the policy copies nothing.
absl::Status PrefillEngine::Order(const std::shared_ptr<Job>& job) {
  PublishOrder order{.runs = {},
                     .put = job->publish->put,
                     .deadline = job->request.deadline,
                     .cancelled = job->request.cancelled,
                     .on_done = [this, job](const absl::Status& status, const PublishTally& stored) {
                       EndPublish(*job, status, stored);
                     }};
  for (const ReuseSpan& segment : job->publish->segments) {
    const auto text = TextOf(job->request.tokens, segment.range);
    auto source = std::make_shared<SegmentSource>(*job->kv, segment.range.begin, text, segment.range.begin == 0);
    KeepLocalSummary(*job, segment.range, *source);
    order.runs.push_back({.kv = nullptr,
                          .source = std::move(source),
                          .keys = segments_.KeysOf(segment.namespace_key, text),
                          .namespace_key = segment.namespace_key,
                          .quantized = options_.quantize_published});
  }
  job->kv.reset();  // the sources keep what is needed
  if (publisher_->Order(std::move(order))) return absl::OkStatus();
  return absl::UnavailableError("the prefill worker is stopping");
}

void PrefillEngine::EndPublish(const Job& job, const absl::Status& status, const PublishTally& stored) {
  job.publish->on_done(status, {stored, job.stats});
  std::lock_guard lock(mutex_);
  --num_jobs_;
  --num_publishes_;
  idle_.notify_all();
}

void PrefillEngine::UpdateLoad(Job& job, double work) {
  std::lock_guard lock(mutex_);
  const int64_t tokens = std::min(job.queued, static_cast<int64_t>(work));
  queued_tokens_ -= tokens;
  job.queued -= tokens;
}

void PrefillEngine::UpdateRate(double work, double cost, double seconds) {
  std::lock_guard lock(mutex_);
  tokens_per_s_ += kSmoothing * (work / std::max(seconds, 1e-6) - tokens_per_s_);
  cost_per_s_ += kSmoothing * (cost / std::max(seconds, 1e-6) - cost_per_s_);
}

double PrefillEngine::RecomputeSeconds(int64_t first, int32_t count) const {
  const double cost = cost_.Of(first, count);
  std::lock_guard lock(mutex_);
  return cost / std::max(cost_per_s_, 1.0);
}

}  // namespace spl::engine
