#include "services/engine/runtime/decode_engine.h"

#include <algorithm>

#include "services/base/check.h"
#include "services/base/fault_point.h"
#include "services/base/status.h"
#include "services/engine/runtime/local_generator.h"
#include "services/engine/runtime/prompt_replay.h"
#include "services/engine/selection/dense.h"
#include "services/engine/selection/kept_tokens_selector.h"

namespace spl::engine {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kIdleWait{100};  // safety net; every real event wakes the thread
constexpr double kSmoothing = 0.1;

FaultPoint step_fault("engine.decode_step");

}  // namespace

// One continuation of a sequence.
struct DecodeEngine::Fork {
  int32_t index = 0;
  std::unique_ptr<SequenceKv> kv;
  std::unique_ptr<TokenSelector> selector;
  std::unique_ptr<CompactPages> compact;  // null: the selector needs none
  std::unique_ptr<Sampler> sampler;
  std::unique_ptr<WatchedSequence> watched;  // null: not compared with an exact step
  std::unique_ptr<HeadRestorer> restorer;    // null: no head is restored
  int32_t last_token = 0;
  int64_t num_output = 1;  // tokens of this request, the first one included
  bool finished = false;

  // Room for the next position.
  absl::Status Grow() {
    const int64_t next = kv->num_tokens() + 1;
    SPLICE_RETURN_IF_ERROR(kv->Reserve(next));
    return compact == nullptr ? absl::OkStatus() : compact->Reserve(next);
  }
};

struct DecodeEngine::Sequence {
  DecodeRequest request;
  std::vector<Fork> forks;
  std::vector<HeadRestoreReport> restores;  // of each fork, which refer to them; none without restoring
  HeadRestoreReport told;
  bool done = false;

  // Tells of what has been restored or missed since.
  void TellRestores() {
    HeadRestoreReport sum;
    for (const HeadRestoreReport& report : restores) {
      sum.restored += report.restored;
      sum.missed_lease += report.missed_lease;
      sum.missed_pages += report.missed_pages;
      sum.missed_fetch += report.missed_fetch;
    }
    if (!restores.empty()) sum.first_token = restores[0].first_token;
    if (sum == told) return;
    told = sum;
    if (request.on_restore) request.on_restore(sum);
  }

  bool cancelled() const { return request.cancelled->load(std::memory_order_relaxed); }
  size_t num_active() const {
    return static_cast<size_t>(std::count_if(forks.begin(), forks.end(), [](const Fork& f) { return !f.finished; }));
  }
};

DecodeEngine::DecodeEngine(std::shared_ptr<const Model> model, PagePool& pool, const DecodeEngineOptions& options)
    : model_(std::move(model)), pool_(pool), options_(options), fidelity_(*model_, options.fidelity) {}

absl::StatusOr<std::unique_ptr<DecodeEngine>> DecodeEngine::Create(std::shared_ptr<const Model> model, PagePool& pool,
                                                                   const DecodeEngineOptions& options) {
  auto engine = std::unique_ptr<DecodeEngine>(new DecodeEngine(std::move(model), pool, options));
  ExecutorOptions executor = options.executor;
  executor.max_sequences = executor.max_rows;  // a row is a sequence of its own
  SPLICE_ASSIGN_OR_RETURN(engine->executor_, ParallelExecutor::Create(engine->model_, pool.view(), executor));
  SPLICE_RETURN_IF_ERROR(engine->WarmUp());
  DecodeEngine* self = engine.get();
  engine->thread_ = std::thread([self] { self->RunLoop(); });
  return engine;
}

DecodeEngine::~DecodeEngine() { SPLICE_CHECK(!thread_.joinable(), "Stop() was not called"); }

// Two steps of one row: the first builds kernels and touches memory, the second gives a first duration.
absl::Status DecodeEngine::WarmUp() {
  SequenceKv kv(pool_, KvShapeOf(model_->config()));
  SPLICE_RETURN_IF_ERROR(kv.Reserve(2));
  DenseSelector selector(model_->config());
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

absl::Status DecodeEngine::Submit(DecodeRequest request) {
  const ModelConfig& config = model_->config();
  SPLICE_RETURN_IF_ERROR(ValidateSampling(request.sampling, config.vocab_size));
  SPLICE_RETURN_IF_ERROR(ValidateTokens(request.prompt, config, "prompt token"));
  SPLICE_RETURN_IF_ERROR(ValidateTokens(request.left_prompt, config, "prompt token"));
  SPLICE_RETURN_IF_ERROR(ValidateTokens(request.prior_output, config, "token of earlier output"));
  for (const SampledToken& first : request.first_tokens)
    SPLICE_RETURN_IF_ERROR(ValidateTokens({&first.token, 1}, config, "first token"));
  if (request.first_tokens.size() != static_cast<size_t>(request.sampling.num_forks))
    return InvalidArgument("{} first tokens for n = {}", request.first_tokens.size(), request.sampling.num_forks);
  if (request.sampling.num_forks > options_.executor.max_rows)
    return InvalidArgument("n is {}, the decode worker runs {} continuations at once", request.sampling.num_forks,
                           options_.executor.max_rows);
  SPLICE_ASSIGN_OR_RETURN(const auto selector, MakeSelectorFor(*request.kv, request.decode, *model_));
  if (request.heads != nullptr) {
    SPLICE_RETURN_IF_ERROR(CheckHeadRestore(request.restore, *selector, *model_));
    if (request.kv->classes() == nullptr || model_->head_classes() == nullptr)
      return absl::InvalidArgumentError("heads are restored of a sequence with head classes, and this one keeps all");
  }
  auto sequence = std::make_unique<Sequence>();
  sequence->request = std::move(request);
  std::lock_guard lock(mutex_);
  if (stopping_) return absl::UnavailableError("the decode worker is stopping");
  if (inbox_.size() + load_.waiting >= options_.max_queued)
    return Errorf(absl::StatusCode::kResourceExhausted, "the decode queue is full ({} sequences)",
                  inbox_.size() + load_.waiting);
  inbox_.push_back(std::move(sequence));
  woken_ = true;
  wake_.notify_one();
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

void DecodeEngine::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    wake_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void DecodeEngine::RunLoop() {
  while (true) {
    {
      std::unique_lock lock(mutex_);
      if (running_.empty()) wake_.wait_for(lock, kIdleWait, [&] { return woken_ || stopping_; });
      woken_ = false;
      if (stopping_) break;
    }
    CollectInbox();
    DropDead();
    // Admitting may run the model, too.
    StepTurns::Turn turn;
    if (!waiting_.empty() || !running_.empty()) turn = StepTurns::TakeOf(options_.turns.get());
    AdmitWaiting();
    for (auto& sequence : running_) RestoreHeads(*sequence);
    GrowOrPreempt();
    if (!running_.empty()) RunStep();
    RemoveFinished();
  }
  CollectInbox();
  for (auto& sequence : running_) Finish(*sequence, absl::UnavailableError("the decode worker is stopping"));
  for (auto& sequence : waiting_) Finish(*sequence, absl::UnavailableError("the decode worker is stopping"));
  running_.clear();
  waiting_.clear();
}

void DecodeEngine::CollectInbox() {
  std::lock_guard lock(mutex_);
  for (auto& sequence : inbox_) waiting_.push_back(std::move(sequence));
  inbox_.clear();
  load_.waiting = waiting_.size();
}

void DecodeEngine::DropDead() {
  const auto now = Clock::now();
  const auto check = [&](Sequence& sequence) {
    if (sequence.cancelled())
      Finish(sequence, absl::CancelledError("the request was cancelled"));
    else if (now >= sequence.request.deadline)
      Finish(sequence, absl::DeadlineExceededError("the deadline passed while decoding"));
  };
  for (auto& sequence : running_) check(*sequence);
  for (auto& sequence : waiting_) check(*sequence);
  std::erase_if(waiting_, [](const auto& s) { return s->done; });
  RemoveFinished();
}

void DecodeEngine::AdmitWaiting() {
  size_t rows = 0;
  for (const auto& sequence : running_) rows += sequence->num_active();
  while (!waiting_.empty()) {
    Sequence& next = *waiting_.front();
    const size_t wanted = static_cast<size_t>(next.request.sampling.num_forks);
    if (rows + wanted > static_cast<size_t>(options_.executor.max_rows)) break;
    if (const absl::Status status = Start(next); !status.ok()) {
      Finish(next, status);
    } else if (next.num_active() == 0) {
      Finish(next, absl::OkStatus());  // every first token ended its continuation
    } else {
      rows += next.num_active();
      if (next.request.on_start) next.request.on_start();
      running_.push_back(std::move(waiting_.front()));
    }
    waiting_.pop_front();
  }
  std::lock_guard lock(mutex_);
  load_.waiting = waiting_.size();
  load_.running = rows;
}

// What was reserved becomes what the first fork needs: heads may have been restored and tokens left out since.
absl::Status DecodeEngine::TakeCompactPages(DecodeRequest& request, Fork& fork) {
  const int64_t num_tokens = request.kv->num_tokens();
  if (request.compact == nullptr) {
    SPLICE_ASSIGN_OR_RETURN(fork.compact, MakeCompactPages(*fork.selector, *model_, pool_, num_tokens));
    return absl::OkStatus();
  }
  fork.compact = std::move(request.compact);
  return FitCompactPages(*fork.selector, *model_, num_tokens, fork.compact);
}

// Makes the forks; they share the prompt's full pages. The last one takes the sequence's own KV.
absl::Status DecodeEngine::Start(Sequence& sequence) {
  DecodeRequest& request = sequence.request;
  const ModelConfig& config = model_->config();
  const int64_t num_prompt = request.kv->num_tokens() - static_cast<int64_t>(request.prior_output.size());
  const int32_t n = request.sampling.num_forks;
  const std::shared_ptr<const StreamClasses> classes = request.kv->classes();
  const std::shared_ptr<HeadSource> heads = std::move(request.heads);
  if (heads != nullptr) {
    sequence.restores.resize(static_cast<size_t>(n));
    request.kv->FreezeHoles();  // before it is copied
  }
  std::optional<KeptPositions> kept;  // the same of every fork
  for (int32_t i = 0; i < n; ++i) {
    Fork fork{.index = i};
    const SampledToken& first = request.first_tokens[i];
    fork.last_token = first.token;
    fork.finished = first.finish != FinishReason::kNone;
    if (!fork.finished) {
      SPLICE_ASSIGN_OR_RETURN(fork.selector, MakeSelectorFor(*request.kv, request.decode, *model_));
      const int64_t num_tokens = request.kv->num_tokens();
      absl::Status status = TakeCompactPages(request, fork);
      if (status.ok()) status = BeginLists(*model_, pool_, *fork.selector, num_tokens, fork.compact.get());
      if (status.code() == absl::StatusCode::kResourceExhausted)
        return absl::UnavailableError("preempted: the decode worker's KV pool is full");
      SPLICE_RETURN_IF_ERROR(status);
      if (PromptSelector* const selector = fork.selector->of_prompt(); selector != nullptr) {
        status = fork.compact->Reserve(num_tokens + 1);
        if (status.ok() && !kept.has_value()) {
          const std::vector<int32_t>& tokens = request.left_prompt.empty() ? request.prompt : request.left_prompt;
          auto chosen = ChooseOfPrompt(*executor_, tokens, *request.kv, *selector);
          status = chosen.status();
          if (chosen.ok()) kept = *std::move(chosen);
        }
        if (status.ok()) status = KeepPositions(*model_, pool_, *kept, num_tokens, *selector, *fork.compact);
        if (status.code() == absl::StatusCode::kResourceExhausted)
          return absl::UnavailableError("preempted: the decode worker's KV pool is full");
        SPLICE_RETURN_IF_ERROR(status);
      }
      fork.sampler = std::make_unique<Sampler>(request.sampling, config.eos_ids, i, request.prompt,
                                               request.prior_output, num_prompt, config.max_positions);
      fork.sampler->Accept(first.token);
      // What was left out cannot be attended to for comparison.
      if (request.kv->kept() == nullptr) fork.watched = fidelity_.Draw(*fork.selector, classes);
      if (i + 1 < n) {
        auto copy = request.kv->Fork();
        if (!copy.ok()) return absl::UnavailableError("preempted: the decode worker's KV pool is full");
        fork.kv = std::move(*copy);
      } else {
        fork.kv = std::move(request.kv);
      }
      if (heads != nullptr)
        fork.restorer = std::make_unique<HeadRestorer>(request.restore, config, *model_->head_classes(), heads,
                                                       *fork.kv, sequence.restores[static_cast<size_t>(i)]);
    }
    sequence.forks.push_back(std::move(fork));
  }
  request.kv.reset();
  return absl::OkStatus();
}

// What has arrived takes its place, and its heads see everything from the next step on.
void DecodeEngine::RestoreHeads(Sequence& sequence) {
  for (Fork& fork : sequence.forks) {
    if (fork.finished || fork.restorer == nullptr || !fork.restorer->Apply(*fork.kv, fork.num_output)) continue;
    auto selector = MakeSelectorFor(*fork.kv, sequence.request.decode, *model_);
    SPLICE_CHECK(selector.ok(), "a selector that Submit has checked");
    fork.selector = *std::move(selector);
  }
  sequence.TellRestores();
}

// Every active fork gets room for its next position; the youngest sequences give way when the pool is full.
void DecodeEngine::GrowOrPreempt() {
  for (size_t i = 0; i < running_.size(); ++i) {
    for (Fork& fork : running_[i]->forks) {
      while (!running_[i]->done && !fork.finished && !fork.Grow().ok()) {
        size_t youngest = running_.size() - 1;
        while (youngest > i && running_[youngest]->done) --youngest;
        Finish(*running_[youngest], absl::UnavailableError("preempted: the decode worker's KV pool is full"));
      }
    }
  }
  RemoveFinished();
}

void DecodeEngine::RunStep() {
  const auto start = Clock::now();
  // Sequences that choose tokens in different ways take turns; whoever chooses none goes with the first.
  std::vector<std::pair<ScoringPlan, std::vector<Running>>> groups;
  for (auto& sequence : running_) {
    for (Fork& fork : sequence->forks) {
      if (fork.finished) continue;
      const ScoringPlan plan = fork.selector->scoring();
      const auto fits = [&](const auto& group) {
        return plan.scoring == TokenScoring::kNone || group.first.scoring == TokenScoring::kNone ||
               plan.SharesStep(group.first);
      };
      auto group = std::find_if(groups.begin(), groups.end(), fits);
      if (group == groups.end()) group = groups.insert(groups.end(), {plan, {}});
      if (group->first.scoring == TokenScoring::kNone) group->first = plan;
      group->second.push_back({sequence.get(), &fork});
    }
  }
  for (const auto& [plan, forks] : groups) {
    const absl::Status status = RunTogether(forks);
    if (status.ok()) continue;
    if (IsDeviceLost(status)) {
      // Unavailable: the router starts the sequences again elsewhere, with the tokens they have.
      const absl::Status ended = absl::UnavailableError(MessageOf(status));
      for (auto& sequence : running_) Finish(*sequence, ended);
      for (auto& sequence : waiting_) Finish(*sequence, ended);
      waiting_.clear();
      options_.on_device_lost(status);
      return;
    }
    // Whatever a step says, none of its requests is known to be at fault: each was checked when it came. Internal: the
    // router starts them again, too.
    const absl::Status ended = Errorf(absl::StatusCode::kInternal, "a step of the batch failed: {}", MessageOf(status));
    for (const auto& [sequence, fork] : forks) Finish(*sequence, ended);
  }
  std::lock_guard lock(mutex_);
  load_.step_s += kSmoothing * (std::chrono::duration<double>(Clock::now() - start).count() - load_.step_s);
}

absl::Status DecodeEngine::RunTogether(std::span<const Running> forks) {
  SPLICE_RETURN_IF_ERROR(step_fault.Hit().status);
  std::vector<DecodeRow> rows;
  std::vector<Sampler*> samplers;
  std::vector<WatchedSequence*> watched;
  for (const auto& [sequence, fork] : forks) {
    HeadProbe* const probe = fork->restorer == nullptr ? nullptr : fork->restorer->BeginStep();
    rows.push_back({fork->last_token, fork->kv.get(), fork->selector.get(), fork->compact.get(), probe});
    samplers.push_back(fork->sampler.get());
    watched.push_back(fork->watched.get());
  }
  SPLICE_RETURN_IF_ERROR(fidelity_.BeforeStep(*executor_, rows, watched));
  SPLICE_RETURN_IF_ERROR(executor_->Decode(rows));
  SPLICE_RETURN_IF_ERROR(fidelity_.AfterStep(*executor_, rows));
  SPLICE_ASSIGN_OR_RETURN(std::vector<SampledToken> sampled, row_sampler_.Sample(*executor_, samplers));
  // A page of every stream for each row: no running sequence is to give way to a head of another one.
  const auto num_ranks = static_cast<size_t>(pool_.view().num_ranks());
  const std::vector<int64_t> keep_free(
      num_ranks,
      static_cast<int64_t>(rows.size()) * KvShapeOf(model_->config()).num_streams() / static_cast<int64_t>(num_ranks));
  for (size_t i = 0; i < rows.size();) {
    Sequence& sequence = *forks[i].sequence;
    std::vector<DecodeToken> tokens;
    for (; i < rows.size() && forks[i].sequence == &sequence; ++i) {
      Fork& fork = *forks[i].fork;
      fork.kv->set_num_tokens(fork.kv->num_tokens() + 1);
      fork.last_token = sampled[i].token;
      ++fork.num_output;
      fork.finished = sampled[i].finish != FinishReason::kNone;
      if (fork.restorer != nullptr && !fork.finished) fork.restorer->EndStep(*fork.kv, keep_free);
      if (fork.finished) {
        fork.restorer.reset();
        fork.kv.reset();
        fork.compact.reset();
      }
      tokens.push_back({fork.index, std::move(sampled[i])});
    }
    sequence.TellRestores();
    sequence.request.on_tokens(std::move(tokens));
    if (sequence.num_active() == 0) Finish(sequence, absl::OkStatus());
  }
  return absl::OkStatus();
}

// Frees the pages first, so that whoever hears of the end finds them free.
void DecodeEngine::Finish(Sequence& sequence, const absl::Status& status) {
  if (sequence.done) return;
  sequence.done = true;
  sequence.request.kv.reset();
  sequence.request.compact.reset();
  for (Fork& fork : sequence.forks) {
    fork.finished = true;
    fork.restorer.reset();
    fork.kv.reset();
    fork.compact.reset();
  }
  sequence.request.heads.reset();
  sequence.request.on_done(status);
}

void DecodeEngine::RemoveFinished() {
  std::erase_if(running_, [](const auto& s) { return s->done; });
  size_t rows = 0;
  for (const auto& sequence : running_) rows += sequence->num_active();
  std::lock_guard lock(mutex_);
  load_.running = rows;
  load_.waiting = waiting_.size();
}

}  // namespace spl::engine
