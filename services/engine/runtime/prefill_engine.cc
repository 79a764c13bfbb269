#include "services/engine/runtime/prefill_engine.h"

#include <algorithm>
#include <utility>

#include "services/base/check.h"
#include "services/base/fault_point.h"
#include "services/base/status.h"
#include "services/engine/runtime/local_generator.h"

namespace spl::engine {
namespace {

using Clock = std::chrono::steady_clock;

FaultPoint admit_fault("engine.prefill.admit");

// Upper bound of a wait without work. A safety net: only reservations whose writer has vanished free pages unnoticed.
constexpr std::chrono::milliseconds kIdleWait{100};

double Seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

absl::Status Stopping() { return absl::UnavailableError("the prefill worker is stopping"); }

}  // namespace

PrefillEngine::PrefillEngine(std::shared_ptr<const Model> model, const KvPartitions& pool,
                             const PrefillEngineOptions& options)
    : model_(std::move(model)),
      own_pool_(options.shared == nullptr ? std::make_unique<PagePool>(pool, model_->backends()) : nullptr),
      pool_(own_pool_ != nullptr ? *own_pool_ : options.shared->pool()),
      local_{PrefixIndex(pool_, options.on_cache_change),
             SegmentIndex(model_->kv_fingerprint(), options.on_cache_change),
             SessionTable(static_cast<int64_t>(options.session_share * static_cast<double>(pool_.num_pages())),
                          options.session_lease)},
      options_(options),
      meter_(model_->config()),
      budget_(pool_, local_, options.frozen_share, options.reclaim),
      canonical_(model_, pool_, local_.segments,
                 {.max_queued = options.max_canonical_queued,
                  .make_room = [this](int64_t num_pages) { return budget_.MakeRoom(num_pages, false); },
                  .on_computed =
                      [this](const CanonicalTask& task, const auto& source) {
                        harvest_.Offer(source, task.keys, task.namespace_key, task.quantized);
                      }}),
      harvest_(model_, pool_, local_, canonical_, options_),
      fetcher_(model_, pool_, local_, budget_, meter_, options_, [this] { Wake(); }) {}

absl::StatusOr<std::unique_ptr<PrefillEngine>> PrefillEngine::Create(std::shared_ptr<const Model> model,
                                                                     const KvPartitions& pool,
                                                                     const PrefillEngineOptions& options) {
  for (const int32_t rows : {options.executor.max_rows, options.slice_tokens}) {
    if (rows % kernels::kPageTokens != 0)
      return InvalidArgument("prefill: the slice of {} tokens is not a multiple of {}", rows, kernels::kPageTokens);
  }
  auto engine = std::unique_ptr<PrefillEngine>(new PrefillEngine(std::move(model), pool, options));
  ExecutorOptions executor = options.executor;
  executor.max_sequences = static_cast<int32_t>(options.max_concurrent);
  if (options.shared != nullptr) executor.max_sequences += options.shared->max_decode_rows();
  executor.max_span_rows = static_cast<int32_t>(engine->max_prompt_tokens());
  SPLICE_ASSIGN_OR_RETURN(engine->executor_, ParallelExecutor::Create(engine->model_, pool, executor));
  SPLICE_RETURN_IF_ERROR(engine->meter_.WarmUp(*engine->executor_, engine->pool_));
  engine->passes_ = std::make_unique<PrefillPasses>(*engine->executor_, engine->local_, engine->queue_, engine->meter_,
                                                    engine->options_);
  PrefillEngine* self = engine.get();
  self->harvest_.Start([self](int64_t first, int32_t count) { return self->meter_.RecomputeSeconds(first, count); },
                       [self] { self->Wake(); }, [self](SteadyTime until) { return self->WaitForQuiet(until); });
  self->fetcher_.Start();
  if (options.shared != nullptr)
    options.shared->AttachCache({.make_room = [self](int64_t pages) { return self->budget_.MakeRoom(pages, true); },
                                 .on_pages_freed = [self] { self->Wake(); },
                                 .prompts_wait = [self] { return self->IsShortOfPages(); }});
  self->engine_thread_ = std::thread([self] { self->RunLoop(); });
  return engine;
}

PrefillEngine::~PrefillEngine() { SPLICE_CHECK(!engine_thread_.joinable(), "Stop() was not called"); }

int64_t PrefillEngine::max_prompt_tokens() const {
  return std::min<int64_t>(model_->config().max_positions - 1, max_cached_tokens());
}

int64_t PrefillEngine::max_cached_tokens() const {
  return pool_.num_pages() / KvShapeOf(model_->config()).num_streams() * kernels::kPageTokens;
}

absl::Status PrefillEngine::Submit(PrefillRequest request) {
  SPLICE_ASSIGN_OR_RETURN(
      auto job, MakeJob(std::move(request), *model_, max_prompt_tokens(), local_.segments, options_.store != nullptr));
  return Enqueue(std::move(job));
}

absl::Status PrefillEngine::Publish(PublishRequest request) {
  if (options_.store == nullptr)
    return Errorf(absl::StatusCode::kFailedPrecondition,
                  "the prefill worker has no chunk store to publish to; start it with --store");
  SPLICE_ASSIGN_OR_RETURN(auto job, MakeJob(std::move(request), *model_, max_prompt_tokens()));
  return Enqueue(std::move(job));
}

absl::Status PrefillEngine::Enqueue(std::shared_ptr<Job> job) {
  const auto length = static_cast<int64_t>(job->request.tokens.size());
  job->stats.policy = std::string(job->policy->name());
  job->stats.prompt_tokens = length;
  if (options_.prefix_cache || !job->request.session.empty())
    job->keys = chunk::MakePrefixKeys(model_->kv_fingerprint(), job->request.namespace_key, job->request.tokens);
  std::lock_guard lock(mutex_);
  if (stopping_) return Stopping();
  if (num_jobs_ >= options_.max_queued)
    return Errorf(absl::StatusCode::kResourceExhausted, "the prefill queue is full ({} requests)", num_jobs_);
  if (job->publish && num_publishes_ >= options_.max_publish_calls)
    return Errorf(absl::StatusCode::kResourceExhausted, "{} contexts are being published, at most {}; try again",
                  num_publishes_, options_.max_publish_calls);
  ++num_jobs_;
  num_publishes_ += job->publish ? 1 : 0;
  meter_.SetQueued(job->queued, length);
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
  return meter_.load(num_jobs_);
}

void PrefillEngine::WaitIdle(SteadyTime deadline) const {
  std::unique_lock lock(mutex_);
  idle_.wait_until(lock, deadline, [&] { return num_jobs_ == 0; });
}

// Also when prompts wait for pages that what is published may hold.
bool PrefillEngine::WaitForQuiet(SteadyTime until) const {
  std::unique_lock lock(mutex_);
  return idle_.wait_until(lock, until, [&] { return num_jobs_ == 0 || short_of_pages_ || stopping_; });
}

bool PrefillEngine::IsShortOfPages() const {
  std::lock_guard lock(mutex_);
  return short_of_pages_;
}

void PrefillEngine::NotePages(bool are_short) {
  std::lock_guard lock(mutex_);
  if (std::exchange(short_of_pages_, are_short) != are_short) idle_.notify_all();
}

void PrefillEngine::Stop() {
  {
    std::lock_guard lock(mutex_);
    if (stopping_ && !engine_thread_.joinable()) return;
    stopping_ = true;
    wake_.notify_one();
    idle_.notify_all();
  }
  if (options_.shared != nullptr) options_.shared->DetachCache();
  if (engine_thread_.joinable()) engine_thread_.join();
  harvest_.Stop();
}

void PrefillEngine::RunLoop() {
  while (true) {
    {
      std::unique_lock lock(mutex_);
      if (queue_.num_running() == 0 && !CanStepCanonical())
        wake_.wait_until(lock, std::min(Clock::now() + kIdleWait, fetcher_.next_begin()),
                         [&] { return woken_ || stopping_; });
      woken_ = false;
      if (stopping_) break;
    }
    CollectInbox();
    DropDead();
    local_.sessions.Expire(Clock::now());
    if (queue_.has_waiting() || queue_.num_running() > 0 || fetcher_.num_fetching() > 0) canonical_.Cancel();
    AdmitWaiting();
    if (options_.turns != nullptr) options_.turns->SetPromptsReady(queue_.num_running() > 0);
    if (queue_.num_running() > 0) {
      RunStep();
    } else if (CanStepCanonical()) {
      StepCanonical();
    }
  }
  if (options_.turns != nullptr) options_.turns->SetPromptsReady(false);
  canonical_.Stop();
  CollectInbox();
  for (const auto& job : queue_.TakeAll()) FinishJob(job, Stopping());
  fetcher_.Stop();
  for (const auto& job : fetcher_.TakeReady(Clock::now())) FinishJob(job, Stopping());
}

void PrefillEngine::CollectInbox() {
  for (const auto& job : fetcher_.TakeReady(Clock::now())) {
    job->Begin();
    queue_.Run(job);
  }
  std::lock_guard lock(mutex_);
  queue_.Wait(inbox_);
  inbox_.clear();
}

// Ends what was cancelled or is past its deadline. What is being fetched is looked at when it comes back.
void PrefillEngine::DropDead() {
  for (const auto& job : queue_.TakeDead(Clock::now()))
    FinishJob(job, job->cancelled() ? absl::CancelledError("the request was cancelled")
                                    : absl::DeadlineExceededError("the deadline passed before the prompt was done"));
}

void PrefillEngine::AdmitWaiting() {
  const auto now = Clock::now();
  bool are_short = false;
  while (queue_.num_running() + fetcher_.num_fetching() < options_.max_concurrent) {
    const std::shared_ptr<Job> job = queue_.NextWaiting(now);
    if (job == nullptr) break;
    if (!Admit(job)) {
      canonical_.DropQueued();  // pages are short: nothing is computed that nobody has asked for
      are_short = true;
      break;
    }
  }
  NotePages(are_short);
}

// Finds cached chunks and reserves pages for the rest. False when pages are short: the job keeps waiting.
bool PrefillEngine::Admit(const std::shared_ptr<Job>& job) {
  const auto start = Clock::now();
  auto kv = std::make_shared<SequenceKv>(pool_, KvShapeOf(model_->config()));
  const int64_t length = static_cast<int64_t>(job->request.tokens.size());
  local_.AppendLeading(*job, *kv);
  const auto hits = static_cast<size_t>(kv->num_pages_per_stream());
  const int64_t needed = PagesForTokens(model_->config(), length) - kv->num_pages();
  const std::optional<int64_t> room = RoomFor(needed);
  if (!room.has_value() || !budget_.MakeRoom(*room, PromptQueue::IsOverdue(*job, start) || !PagesWillReturn()))
    return false;
  if (!kv->Reserve(length).ok()) return false;  // another thread was faster
  job->kv = std::move(kv);
  job->stats.cached_tokens = job->cached();
  job->stats.looked_up = start;
  (void)admit_fault.Hit();
  job->stats.lookup_s = Seconds(Clock::now() - start);
  queue_.Remove(job);
  if (fetcher_.Take(job, hits)) return true;
  job->Begin();
  queue_.Run(job);
  return true;
}

// What sequences that are decoded in the same pool will need stays free.
std::optional<int64_t> PrefillEngine::RoomFor(int64_t num_pages) const {
  if (options_.shared == nullptr) return num_pages;
  const std::optional<int64_t> growth = options_.shared->GrowthPages();
  if (!growth.has_value()) return std::nullopt;
  return std::min(num_pages + *growth, pool_.num_pages());
}

// Whether somebody works with pages that will be free soon: no reason to drop what was meant to stay.
bool PrefillEngine::PagesWillReturn() {
  if (options_.shared != nullptr && options_.shared->GrowthPages().value_or(1) > 0) return true;
  return queue_.num_running() > 0 || fetcher_.num_fetching() > 0 || budget_.HasHandedOut() || harvest_.busy();
}

void PrefillEngine::RunStep() {
  for (const PrefillPasses::Ended& ended : passes_->RunNext()) {
    if (!ended.status.ok()) {
      FailAll(ended.jobs, ended.status);
    } else {
      for (const auto& job : ended.jobs) FinishJob(job, absl::OkStatus());
    }
  }
}

// Ends the batch; and everything else, too, when the device is lost.
void PrefillEngine::FailAll(std::span<const std::shared_ptr<Job>> batch, const absl::Status& failed) {
  const bool lost = IsDeviceLost(failed);
  const absl::Status ended = lost ? absl::UnavailableError(MessageOf(failed)) : failed;
  for (const auto& job : batch) FinishJob(job, ended);
  if (!lost) return;
  for (const auto& job : queue_.TakeAll()) FinishJob(job, ended);
  options_.on_device_lost(failed);
}

// Engine thread.
bool PrefillEngine::CanStepCanonical() const {
  return queue_.num_running() == 0 && !queue_.has_waiting() && fetcher_.num_fetching() == 0 && canonical_.has_work();
}

bool PrefillEngine::WorkArrived() const {
  std::lock_guard lock(mutex_);
  return !inbox_.empty() || fetcher_.has_progress() || stopping_;
}

// One slice, or the part of it until a request comes.
void PrefillEngine::StepCanonical() {
  const StepTurns::Turn turn = StepTurns::TakeOf(options_.turns.get(), StepTurns::Work::kPrompts);
  const absl::StatusOr<CanonicalPrefill::Pass> pass = canonical_.Step(*executor_, [this] { return WorkArrived(); });
  if (!pass.ok()) return FailAll({}, pass.status());
  if (pass->work > 0) meter_.Add(pass->work, pass->cost, pass->seconds);
}

void PrefillEngine::FinishJob(const std::shared_ptr<Job>& job, const absl::Status& status) {
  queue_.Remove(job);
  if (job->started != Clock::time_point{})
    job->stats.prefill_s = Seconds(Clock::now() - job->started) - job->run_lookup_s;
  meter_.SetQueued(job->queued, 0);
  job->EndFetch();
  const bool answers = !job->publish.has_value();
  if (answers) {  // before anything is kept: the next step may be waiting for it
    if (job->kv) budget_.HandOut(job->kv);
    job->request.on_done(status, job->TakeOutcome(status.ok()));
  }
  if (status.ok() && job->request.publish) harvest_.Keep(*job);
  job->run.reset();  // gives its sources back
  job->fetched = {};
  if (!answers) {
    const auto on_done = [this, job](const absl::Status& ended, const PublishTally& stored) {
      EndPublish(*job, ended, stored);
    };
    const absl::Status ordered = status.ok() ? harvest_.Publish(*job, on_done) : status;
    if (!ordered.ok()) EndPublish(*job, ordered, {});
    return;
  }
  job->kv.reset();
  job->request.on_done = nullptr;  // a thread that still fetches for it must not keep alive what its caller holds
  job->request.on_layer = nullptr;
  CountFinished();
}

// Engine thread, or one of the publisher. A caller who learns that one call has ended has room for the next.
void PrefillEngine::EndPublish(const Job& job, const absl::Status& status, const PublishTally& stored) {
  {
    std::lock_guard lock(mutex_);
    --num_publishes_;
  }
  job.publish->on_done(status, {stored, job.stats});
  CountFinished();
}

void PrefillEngine::CountFinished() {
  std::lock_guard lock(mutex_);
  --num_jobs_;
  idle_.notify_all();
}

}  // namespace spl::engine
