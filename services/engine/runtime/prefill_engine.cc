#include "services/engine/runtime/prefill_engine.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>

#include "services/base/check.h"
#include "services/base/fault_point.h"
#include "services/base/status.h"
#include "services/engine/runtime/local_generator.h"
#include "services/engine/runtime/step_offer.h"

namespace spl::engine {
namespace {

using Clock = std::chrono::steady_clock;

FaultPoint admit_fault("engine.prefill.admit");
FaultPoint step_fault("engine.prefill.step");

// Upper bound of a wait without work: a safety net, every real event wakes the thread.
constexpr std::chrono::milliseconds kIdleWait{100};

// A pass of fewer rows is bound by the reading of weights, with a decode step along or without.
constexpr int32_t kLeastRowsWithRiders = 256;
// A pass of fewer rows costs little less, so that a step that is due waits for so many.
constexpr int32_t kLeastRows = 128;

double Seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

absl::Status Stopping() { return absl::UnavailableError("the prefill worker is stopping"); }

}  // namespace

// Slices of several prompts that run the same layers.
struct PrefillEngine::Pass {
  std::vector<std::shared_ptr<Job>> jobs;
  std::vector<PrefillSlice> slices;  // [jobs.size()]
  PassLayers layers;
  StepOffer* riders = nullptr;  // a decode step that shares the pass; null: none
};

PrefillEngine::PrefillEngine(std::shared_ptr<const Model> model, const KvPartitions& pool,
                             const PrefillEngineOptions& options)
    : model_(std::move(model)),
      own_pool_(options.shared == nullptr ? std::make_unique<PagePool>(pool, model_->backends()) : nullptr),
      pool_(own_pool_ != nullptr ? *own_pool_ : options.shared->pool()),
      local_{PrefixIndex(pool_, options.on_cache_change), SegmentIndex(model_->fingerprint(), options.on_cache_change),
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
      fetcher_(model_, pool_, local_, budget_, options_, [this] { Wake(); }) {}

absl::StatusOr<std::unique_ptr<PrefillEngine>> PrefillEngine::Create(std::shared_ptr<const Model> model,
                                                                     const KvPartitions& pool,
                                                                     const PrefillEngineOptions& options) {
  if (options.executor.max_rows % kernels::kPageTokens != 0)
    return InvalidArgument("prefill: the slice of {} tokens is not a multiple of {}", options.executor.max_rows,
                           kernels::kPageTokens);
  auto engine = std::unique_ptr<PrefillEngine>(new PrefillEngine(std::move(model), pool, options));
  ExecutorOptions executor = options.executor;
  executor.max_sequences = static_cast<int32_t>(options.max_concurrent);
  if (options.shared != nullptr) executor.max_sequences += options.shared->max_decode_rows();
  executor.max_span_rows = static_cast<int32_t>(engine->max_prompt_tokens());
  SPLICE_ASSIGN_OR_RETURN(engine->executor_, ParallelExecutor::Create(engine->model_, pool, executor));
  SPLICE_RETURN_IF_ERROR(engine->meter_.WarmUp(*engine->executor_, engine->pool_));
  PrefillEngine* self = engine.get();
  self->harvest_.Start([self](int64_t first, int32_t count) { return self->meter_.RecomputeSeconds(first, count); },
                       [self] { self->Wake(); });
  self->fetcher_.Start();
  if (options.shared != nullptr)
    options.shared->AttachCache({.make_room = [self](int64_t pages) { return self->budget_.MakeRoom(pages, true); },
                                 .on_pages_freed = [self] { self->Wake(); }});
  self->engine_thread_ = std::thread([self] { self->RunLoop(); });
  return engine;
}

PrefillEngine::~PrefillEngine() { SPLICE_CHECK(!engine_thread_.joinable(), "Stop() was not called"); }

int64_t PrefillEngine::max_prompt_tokens() const {
  const int64_t pages = pool_.num_pages() / KvShapeOf(model_->config()).num_streams();
  return std::min<int64_t>(model_->config().max_positions - 1, pages * kernels::kPageTokens);
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
  if (options_.prefix_cache)
    job->keys = chunk::MakePrefixKeys(model_->fingerprint(), job->request.namespace_key, job->request.tokens);
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

void PrefillEngine::Stop() {
  {
    std::lock_guard lock(mutex_);
    if (stopping_ && !engine_thread_.joinable()) return;
    stopping_ = true;
    wake_.notify_one();
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
        wake_.wait_for(lock, kIdleWait, [&] { return woken_ || stopping_; });
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
  for (const auto& job : fetcher_.TakeFetched()) FinishJob(job, Stopping());
}

void PrefillEngine::CollectInbox() {
  for (const auto& job : fetcher_.TakeFetched()) {
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
  while (queue_.num_running() + fetcher_.num_fetching() < options_.max_concurrent) {
    const std::shared_ptr<Job> job = queue_.NextWaiting(now);
    if (job == nullptr) break;
    if (!Admit(job)) {
      canonical_.DropQueued();  // pages are short: nothing is computed that nobody has asked for
      break;
    }
  }
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
  const StepTurns::Turn turn = StepTurns::TakeOf(options_.turns.get(), StepTurns::Work::kPrompts);
  const auto start = Clock::now();
  (void)step_fault.Hit();
  Pass pass = ChoosePass();
  if (pass.jobs.empty()) return;
  Board(pass);
  absl::Status status = RunPass(pass);
  if (status.code() == absl::StatusCode::kCancelled) return Land(pass, status);  // DropDead ends the prompts
  double tokens = 0, cost = 0;
  for (size_t i = 0; i < pass.jobs.size() && status.ok(); ++i) {
    Job& job = *pass.jobs[i];
    const double done = job.run->pass_work();
    tokens += done;
    cost += meter_.cost().Of(pass.slices[i].positions, pass.layers.layers.begin, pass.layers.layers.end);
    meter_.SetQueued(job.queued, job.queued - std::min(job.queued, static_cast<int64_t>(done)));
    status = job.run->Finish(*executor_);
  }
  if (status.ok() && options_.turns != nullptr) {
    // The device has done the slice when another engine's turn comes.
    if (const std::shared_ptr<const kernels::Fence> fence = executor_->RecordFence(); fence != nullptr)
      status = fence->Wait();
  }
  if (!status.ok()) {
    Land(pass, status);
    return FailAll(pass.jobs, status);
  }
  meter_.Add(tokens, cost, Seconds(Clock::now() - start));
  if (options_.turns != nullptr) options_.turns->NotePrompts(static_cast<int64_t>(tokens));
  FinishPass(pass);
}

// As many as are computed until the next decode step is due on a device that is shared. Of a pass that takes a step along
// as many as keep prompts and running sequences in balance.
int32_t PrefillEngine::RowsOfPass() const {
  const int32_t most = executor_->max_rows();
  if (options_.turns == nullptr) return most;
  const auto riders = static_cast<int32_t>(options_.turns->num_offered());
  const std::chrono::nanoseconds time = riders > 0 ? options_.turns->itl_target() : options_.turns->TimeToDecode();
  if (time == std::chrono::nanoseconds::max()) return most;
  double rows = Seconds(time) * meter_.load(0).tokens_per_s;
  if (const double per_token = options_.turns->PromptRowsPerToken(); riders > 0 && per_token > 0)
    rows = std::min(rows, per_token * riders);
  const double least = riders > 0 ? kLeastRowsWithRiders : kLeastRows;
  rows = std::clamp(rows, std::min<double>(least, most), static_cast<double>(most));
  // Whole pages, riders included.
  const int32_t whole = static_cast<int32_t>(rows) / kernels::kPageTokens * kernels::kPageTokens;
  return std::max(whole - riders, std::min(most, kernels::kPageTokens));
}

// The prompt whose turn it is, and as many behind it as have the same layers to run and fit.
PrefillEngine::Pass PrefillEngine::ChoosePass() {
  Pass pass;
  int32_t room = RowsOfPass();
  for (const auto& job : queue_.RunningInOrder(Clock::now())) {
    if (job->run == nullptr) {
      if (const absl::Status started = job->StartRun(local_, *executor_); !started.ok()) {
        FailAll({&job, 1}, started);
        if (IsDeviceLost(started)) return {};
        continue;  // the others of the step do not depend on it
      }
      meter_.SetQueued(job->queued, static_cast<int64_t>(std::ceil(job->run->remaining_work())));
    }
    if (!pass.jobs.empty() && (job->run->alone() || job->run->layers() != pass.layers)) continue;
    const PrefillSlice slice = job->NextSlice(room);
    if (slice.tokens.empty()) continue;
    pass.layers = job->run->layers();
    pass.slices.push_back(slice);
    pass.jobs.push_back(job);
    room -= static_cast<int32_t>(slice.tokens.size());
    if (job->run->alone()) break;
  }
  return pass;
}

// A decode step that waits shares the pass, where its slices are plain ones.
void PrefillEngine::Board(Pass& pass) {
  if (options_.shared == nullptr || options_.turns->num_offered() == 0) return;
  const bool plain = pass.layers == PassLayers{{0, model_->config().num_layers}} &&
                     std::all_of(pass.slices.begin(), pass.slices.end(),
                                 [](const PrefillSlice& slice) { return slice.observers == nullptr; });
  size_t rows = options_.turns->num_offered();
  for (const PrefillSlice& slice : pass.slices) rows += slice.tokens.size();
  if (!plain || rows > static_cast<size_t>(executor_->max_rows())) return options_.turns->CannotBoard();
  pass.riders = options_.turns->Board();
}

absl::Status PrefillEngine::RunPass(const Pass& pass) {
  const bool announces = std::any_of(pass.jobs.begin(), pass.jobs.end(),
                                     [](const auto& job) { return job->request.on_layer != nullptr; });
  return executor_->Prefill(pass.slices, pass.layers, [&](int32_t layer) {
    bool any_alive = pass.riders != nullptr;
    const std::shared_ptr<const kernels::Fence> fence = announces ? executor_->RecordFence() : nullptr;
    for (const auto& job : pass.jobs) {
      any_alive |= !job->cancelled();
      job->AnnounceLayer(layer, fence);
    }
    return any_alive;
  }, pass.riders == nullptr ? std::span<const DecodeRow>() : pass.riders->rows);
}

// Ends the prompts that are complete now; the logits of those that have an answer are one product.
void PrefillEngine::FinishPass(Pass& pass) {
  std::vector<int32_t> last_rows;
  std::vector<std::shared_ptr<Job>> complete;
  int32_t row = 0;
  for (size_t i = 0; i < pass.jobs.size(); ++i) {
    const std::shared_ptr<Job>& job = pass.jobs[i];
    row += static_cast<int32_t>(pass.slices[i].tokens.size());
    if (!job->run->done()) continue;
    job->EndRun();
    if (job->publish) {
      FinishJob(job, absl::OkStatus());
    } else {
      last_rows.push_back(row - 1);
      complete.push_back(job);
    }
  }
  if (complete.empty() && pass.riders == nullptr) return;
  for (size_t i = 0; pass.riders != nullptr && i < pass.riders->rows.size(); ++i)
    last_rows.push_back(row + static_cast<int32_t>(i));
  absl::Status status = executor_->ComputeLogits(last_rows);
  if (status.ok()) status = SampleFirstTokens(complete);
  Land(pass, status, static_cast<int32_t>(complete.size()));
  if (!status.ok()) return FailAll(complete, status);
  for (const auto& job : complete) FinishJob(job, absl::OkStatus());
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

// Gives the step that shared the pass its tokens; its logits are those from row `first` on.
void PrefillEngine::Land(Pass& pass, const absl::Status& computed, int32_t first) {
  StepOffer* const riders = std::exchange(pass.riders, nullptr);
  if (riders == nullptr) return;
  riders->status = computed;
  if (computed.ok()) {
    std::vector<int32_t> rows(riders->rows.size());
    std::iota(rows.begin(), rows.end(), first);
    absl::StatusOr<std::vector<SampledToken>> sampled = row_sampler_.Sample(*executor_, riders->samplers, rows);
    riders->status = sampled.status();
    if (sampled.ok()) riders->sampled = *std::move(sampled);
  }
  options_.turns->Land(*riders);
}

// Engine thread.
bool PrefillEngine::CanStepCanonical() const {
  return queue_.num_running() == 0 && !queue_.has_waiting() && fetcher_.num_fetching() == 0 && canonical_.has_work();
}

bool PrefillEngine::WorkArrived() const {
  std::lock_guard lock(mutex_);
  return !inbox_.empty() || fetcher_.has_fetched() || stopping_;
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
  if (status.ok() && job->request.publish) harvest_.Keep(*job);
  job->run.reset();  // gives its sources back
  job->fetched = {};
  if (job->publish) {
    const auto on_done = [this, job](const absl::Status& ended, const PublishTally& stored) {
      EndPublish(*job, ended, stored);
    };
    const absl::Status ordered = status.ok() ? harvest_.Publish(*job, on_done) : status;
    if (!ordered.ok()) EndPublish(*job, ordered, {});
    return;
  }
  if (job->kv) budget_.HandOut(job->kv);
  job->request.on_done(status, job->TakeOutcome(status.ok()));
  CountFinished(false);
}

// Engine thread, or one of the publisher.
void PrefillEngine::EndPublish(const Job& job, const absl::Status& status, const PublishTally& stored) {
  job.publish->on_done(status, {stored, job.stats});
  CountFinished(true);
}

void PrefillEngine::CountFinished(bool published) {
  std::lock_guard lock(mutex_);
  --num_jobs_;
  num_publishes_ -= published ? 1 : 0;
  idle_.notify_all();
}

}  // namespace spl::engine
