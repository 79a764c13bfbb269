#include "services/engine/runtime/decode_engine.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "services/base/check.h"
#include "services/base/status.h"
#include "services/engine/runtime/local_generator.h"
#include "services/engine/runtime/measure_step_costs.h"
#include "services/engine/selection/dense.h"

namespace spl::engine {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kIdleWait{100};  // safety net; every real event wakes the thread
constexpr double kSmoothing = 0.1;

// Turns are of whole steps.
bool TakesTurns(const DecodeEngineOptions& options) {
  return options.turns != nullptr && options.turns->sharing() == StepTurns::Sharing::kTurns;
}

bool IsAsync(const DecodeEngineOptions& options, const ParallelExecutor& executor) {
  if (!executor.samples_later() || TakesTurns(options)) return false;
  return options.async_scheduling.value_or(!executor.model().backend().host_memory());
}

std::function<bool(int64_t)> MakeRoomOf(const DecodeEngineOptions& options) {
  if (options.shared == nullptr) return nullptr;
  return [shared = options.shared](int64_t num_pages) { return shared->MakeRoom(num_pages); };
}

}  // namespace

DecodeEngine::DecodeEngine(PagePool& pool, const DecodeEngineOptions& options,
                           std::unique_ptr<ParallelExecutor> executor)
    : pool_(pool),
      options_(options),
      executor_(std::move(executor)),
      delivery_(options.max_undelivered),
      fidelity_(executor_->model(), options.fidelity),
      batch_(options.shared.get(), delivery_),
      adaptive_(options.step_costs.has_value() ? *options.step_costs : StepCosts::BuiltIn(),
                {.gathered_tokens = options.gathered_tokens}),
      preemption_(executor_->model(), pool, MakeRoomOf(options), batch_, options.parked_bytes),
      start_(*executor_, pool, fidelity_),
      admission_(batch_, preemption_, start_,
                 {.max_rows = options.executor.max_rows, .gathered_tokens = options.gathered_tokens}),
      step_(*executor_, batch_, adaptive_, fidelity_, delivery_, IsAsync(options, *executor_), options.on_pass) {}

absl::StatusOr<std::unique_ptr<DecodeEngine>> DecodeEngine::Create(std::shared_ptr<const Model> model, PagePool& pool,
                                                                   const DecodeEngineOptions& options) {
  ExecutorOptions for_rows = options.executor;
  for_rows.max_sequences = for_rows.max_rows;  // a row is a sequence of its own
  SPLICE_ASSIGN_OR_RETURN(auto executor, ParallelExecutor::Create(std::move(model), pool.view(), for_rows));
  auto engine = std::unique_ptr<DecodeEngine>(new DecodeEngine(pool, options, std::move(executor)));
  SPLICE_RETURN_IF_ERROR(engine->WarmUp());
  SPLICE_RETURN_IF_ERROR(engine->ChooseStepCosts());
  SPLICE_RETURN_IF_ERROR(engine->MakeHostTier());
  DecodeEngine* self = engine.get();
  engine->thread_ = std::thread([self] { self->RunLoop(); });
  if (options.shared != nullptr)
    options.shared->AttachDecoder(
        {.growth_pages = [self] { return self->GrowthPages(); }, .max_rows = options.executor.max_rows});
  return engine;
}

DecodeEngine::~DecodeEngine() { SPLICE_CHECK(!thread_.joinable(), "Stop() was not called"); }

// Two steps of one row: the first builds kernels and touches memory, the second gives a first duration.
absl::Status DecodeEngine::WarmUp() {
  SequenceKv kv(pool_, KvShapeOf(model().config()));
  SPLICE_RETURN_IF_ERROR(kv.Reserve(2));
  DenseSelector selector(model().config());
  for (int pass = 0; pass < 2; ++pass) {
    const auto start = Clock::now();
    const DecodeRow row{0, &kv, &selector};
    SPLICE_RETURN_IF_ERROR(executor_->Decode({&row, 1}));
    SPLICE_RETURN_IF_ERROR(executor_->Argmax().status());
    kv.set_num_tokens(pass + 1);
    load_.step_s = std::chrono::duration<double>(Clock::now() - start).count();
  }
  return absl::OkStatus();
}

absl::Status DecodeEngine::ChooseStepCosts() {
  if (options_.step_costs.has_value()) return absl::OkStatus();
  if (!options_.measure_step_costs.value_or(!model().backend().host_memory())) return absl::OkStatus();
  absl::StatusOr<StepCosts> costs = MeasureStepCosts(*executor_, pool_, options_.step_costs_limit);
  if (costs.ok()) adaptive_.set_costs(*std::move(costs));
  return IsDeviceLost(costs.status()) ? costs.status() : absl::OkStatus();
}

absl::Status DecodeEngine::MakeHostTier() {
  if (options_.host_tier.bytes == 0) return absl::OkStatus();
  SPLICE_ASSIGN_OR_RETURN(host_tier_, HostTier::Create(model(), pool_, MakeRoomOf(options_), options_.host_tier));
  return absl::OkStatus();
}

absl::Status DecodeEngine::Submit(DecodeRequest request) {
  SPLICE_ASSIGN_OR_RETURN(auto sequence, DecodeSequence::Make(std::move(request), model(), options_.executor.max_rows));
  std::lock_guard lock(mutex_);
  if (stopping_) return absl::UnavailableError("the decode worker is stopping");
  if (inbox_.size() + load_.waiting >= options_.max_queued)
    return Errorf(absl::StatusCode::kResourceExhausted, "the decode queue is full ({} sequences)",
                  inbox_.size() + load_.waiting);
  inbox_.push_back(std::move(sequence));
  woken_ = true;
  wake_.notify_one();
  if (options_.turns != nullptr) options_.turns->Joined();
  return absl::OkStatus();
}

void DecodeEngine::Wake() {
  std::lock_guard lock(mutex_);
  woken_ = true;
  wake_.notify_one();
}

DecodeLoad DecodeEngine::load() const {
  std::lock_guard lock(mutex_);
  DecodeLoad load = load_;
  load.waiting += inbox_.size();
  return load;
}

int64_t DecodeEngine::GrowthPages() const {
  const DecodeLoad load = this->load();
  if (load.parked > 0) return -1;
  return static_cast<int64_t>(load.running + load.waiting) * KvShapeOf(model().config()).num_streams();
}

void DecodeEngine::Stop() {
  if (options_.shared != nullptr) options_.shared->DetachDecoder();
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    wake_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
  pool_.OnNextFree(nullptr);
  delivery_.Stop();
}

void DecodeEngine::RunLoop() {
  while (true) {
    delivery_.WaitForRoom();
    const bool idle = batch_.running().empty() && !batch_.TakeLookAgain();
    // Those that wait may wait for pages that others hold.
    if (idle && !batch_.waiting().empty()) pool_.OnNextFree([this] { Wake(); });
    {
      std::unique_lock lock(mutex_);
      if (idle) wake_.wait_for(lock, kIdleWait, [&] { return woken_ || stopping_; });
      woken_ = false;
      if (stopping_) break;
    }
    if (options_.turns != nullptr && !batch_.running().empty()) options_.turns->WaitForJoins();
    CollectInbox();
    DropDead();
    StepTurns::Turn turn;
    const DecodeCounts counts = batch_.counts();
    if (options_.turns != nullptr) options_.turns->SetDecoding(counts.running + counts.waiting);
    if (TakesTurns(options_) && StartsOnDevice())
      turn = StepTurns::TakeOf(options_.turns.get(), StepTurns::Work::kDecoding);
    admission_.AdmitWaiting();
    MoveToHost();
    if (!preemption_.Grow()) {
      TakeUnderWay();  // pages of running sequences are about to move
      preemption_.GrowOrPreempt();
    }
    Publish();
    if (!batch_.running().empty()) RunStep(std::move(turn));
    batch_.RemoveFinished();
    Publish();
  }
  if (options_.turns != nullptr) options_.turns->SetDecoding(0);  // nobody waits for a step
  CollectInbox();
  TakeUnderWay();
  batch_.FinishAll(absl::UnavailableError("the decode worker is stopping"));
  batch_.RemoveFinished();
  Publish();
}

void DecodeEngine::CollectInbox() {
  std::lock_guard lock(mutex_);
  for (auto& sequence : inbox_) {
    sequence->order = next_order_++;
    batch_.Wait(std::move(sequence));
  }
  inbox_.clear();
  load_.waiting = batch_.waiting().size();
}

void DecodeEngine::TakeUnderWay() {
  if (!step_.under_way()) return;
  if (const absl::Status lost = step_.TakeUnderWay(); !lost.ok()) TellDeviceLost(lost);
}

// Before sequences grow: it frees pages.
void DecodeEngine::MoveToHost() {
  if (host_tier_ == nullptr || !host_tier_->HasWork(batch_)) return;
  TakeUnderWay();
  const int64_t free_before = pool_.num_free();
  host_tier_->MoveSome(batch_);
  batch_.RemoveFinished();
  if (pool_.num_free() <= free_before) return;
  batch_.LookAgain();
  if (options_.shared != nullptr) options_.shared->PagesFreed();
}

void DecodeEngine::DropDead() {
  const auto now = Clock::now();
  const auto is_dead = [&](const auto& sequence) { return sequence->cancelled() || now >= sequence->request.deadline; };
  if (std::any_of(batch_.running().begin(), batch_.running().end(), is_dead)) TakeUnderWay();
  const auto check = [&](DecodeSequence& sequence) {
    if (sequence.cancelled())
      batch_.Finish(sequence, absl::CancelledError("the request was cancelled"));
    else if (now >= sequence.request.deadline)
      batch_.Finish(sequence, absl::DeadlineExceededError("the deadline passed while decoding"));
  };
  for (auto& sequence : batch_.running()) check(*sequence);
  for (auto& sequence : batch_.waiting()) check(*sequence);
  batch_.RemoveFinished();
  Publish();
}

bool DecodeEngine::StartsOnDevice() const {
  const auto& waiting = batch_.waiting();
  return std::any_of(waiting.begin(), waiting.end(), [](const auto& sequence) {
    return !sequence->started() && (DecodeStart::HasSlices(*sequence) || !sequence->steps_are_alone);
  });
}

void DecodeEngine::RunStep(StepTurns::Turn turn) {
  if (options_.turns != nullptr && !turn.held()) {
    // Passes of prompts reach the pages only in a pool that is theirs, too.
    const bool may_ride = options_.shared != nullptr && options_.turns->MayRide(batch_.counts().running);
    if (may_ride && step_.under_way()) {  // a pass needs the tokens of the step before
      turn = options_.turns->Take(StepTurns::Work::kDecoding);
      return TakeUnderWay();
    }
    if (StepOffer* const offer = may_ride ? step_.Offer() : nullptr; offer != nullptr) {
      std::optional<StepTurns::Turn> own = options_.turns->TakeOrRide(*offer);
      if (!own.has_value()) {
        options_.turns->NoteTokens(static_cast<int64_t>(offer->rows.size()));
        if (const absl::Status lost = step_.Land(); !lost.ok()) TellDeviceLost(lost);
        return;
      }
      turn = *std::move(own);
    } else {
      turn = options_.turns->Take(StepTurns::Work::kDecoding);
    }
  }
  const auto start = Clock::now();
  const uint64_t before = step_.num_steps();
  if (options_.turns != nullptr) options_.turns->NoteTokens(static_cast<int64_t>(batch_.counts().running));
  if (const absl::Status lost = step_.Run(); !lost.ok()) return TellDeviceLost(lost);
  if (step_.num_steps() == before) return;  // the first of a row of steps has been started
  std::lock_guard lock(mutex_);
  load_.step_s += kSmoothing * (std::chrono::duration<double>(Clock::now() - start).count() - load_.step_s);
}

// Everybody has heard of the end of their sequences before the process ends.
void DecodeEngine::TellDeviceLost(const absl::Status& status) {
  Publish();
  delivery_.WaitForAll();
  options_.on_device_lost(status);
}

void DecodeEngine::Publish() {
  const DecodeCounts counts = batch_.counts();
  std::unique_lock lock(mutex_);
  load_.running = counts.running;
  load_.waiting = counts.waiting;
  load_.parked = counts.parked;
  load_.parked_bytes = counts.parked_bytes;
  if (host_tier_ != nullptr) {
    load_.host_kv_bytes = host_tier_->memory().used_bytes();
    load_.host_rows = host_tier_->memory().counts();
  }
  load_.preemptions = preemption_.num_preemptions();
  load_.num_steps = step_.num_steps();
  load_.host_s = step_.host_s();
  lock.unlock();
  delivery_.Flush();
}

}  // namespace spl::engine
