#include "services/engine/runtime/decode_engine.h"

#include <algorithm>

#include "services/base/check.h"
#include "services/base/fault_point.h"
#include "services/base/status.h"
#include "services/engine/methods/selection_methods.h"
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
  std::deque<int32_t> replay;  // come next, whatever is drawn; the client has them
  int64_t num_output = 1;      // tokens of this request, the first one included
  bool finished = false;

  // Pages of each rank that Grow takes at most, of a model with so many streams a rank.
  int64_t GrowthPages(int64_t streams) const {
    const int64_t next = kv->num_tokens() + 1;
    const bool compact_grows =
        compact != nullptr && compact->needs().page_tokens > 0 && (next - 1) % compact->needs().page_tokens == 0;
    return (next > kv->capacity() ? streams : 0) + (compact_grows ? streams : 0);
  }
  // Room for the next position.
  absl::Status Grow() {
    const int64_t next = kv->num_tokens() + 1;
    SPLICE_RETURN_IF_ERROR(kv->Reserve(next));
    return compact == nullptr ? absl::OkStatus() : compact->Reserve(next);
  }
};

struct DecodeEngine::Sequence {
  DecodeRequest request;
  uint64_t order = 0;                   // of arrival
  std::vector<Fork> forks;              // none before it has started
  std::unique_ptr<ParkedPages> parked;  // null: its pages are in the pool
  // Traits of its selector, the same for all of its life.
  bool chooses_by_prompt = false;           // before it starts (PromptSelector), unless nothing is decoded
  bool gathers_keys = false;                // in its first step
  bool steps_are_alone = true;              // what a step attends to does not depend on the steps before it
  std::unique_ptr<TokenSelector> chooser;   // of a choice that is being made
  std::unique_ptr<PromptChoice> choice;     // refers to it and to request.kv
  std::optional<KeptPositions> of_prompt;   // what its selector chose, the same of every fork
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

  // The pages of a choice that is not done go back; it is made anew.
  void DropChoice() {
    choice.reset();
    chooser.reset();
  }
  bool has_to_choose() const { return chooses_by_prompt && !of_prompt.has_value(); }
  // Tokens are left that one step may have many of.
  bool has_to_replay() const { return request.replay.size() > 1 && steps_are_alone && request.heads == nullptr; }
  // Positions whose keys its first step gathers.
  int64_t gathered_tokens() const { return gathers_keys ? request.kv->num_tokens() : 0; }
  const std::vector<int32_t>& tokens() const {
    return request.left_prompt.empty() ? request.prompt : request.left_prompt;
  }
  bool started() const { return !forks.empty(); }
  bool runs() const { return !done && parked == nullptr; }
  PageHolders Holders() const {
    PageHolders holders{{request.kv.get()}, {request.compact.get()}};
    for (const Fork& fork : forks) {
      holders.kv.push_back(fork.kv.get());
      holders.compact.push_back(fork.compact.get());
    }
    return holders;
  }
  // Continuations that take part in a step.
  size_t num_rows() const { return started() ? num_active() : static_cast<size_t>(request.sampling.num_forks); }

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
  SPLICE_RETURN_IF_ERROR(ValidateTokens(request.replay, config, "token to replay"));
  if (!request.replay.empty() && (request.sampling.num_forks != 1 || !request.prior_output.empty()))
    return InvalidArgument("{} tokens to replay for n = {} with {} tokens of earlier output", request.replay.size(),
                           request.sampling.num_forks, request.prior_output.size());
  // The first one is the first token of the answer.
  if (!request.replay.empty()) request.first_tokens = {{.token = request.replay[0]}};
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
  const TokenScoring scoring = selector->scoring().scoring;
  sequence->gathers_keys = scoring == TokenScoring::kCompactKeys || scoring == TokenScoring::kPageBounds;
  sequence->steps_are_alone = !CompactNeedsOf(*selector, *model_, request.kv->num_tokens()).has_value();
  sequence->chooses_by_prompt =
      selector->of_prompt() != nullptr &&
      std::any_of(request.first_tokens.begin(), request.first_tokens.end(),
                  [](const SampledToken& first) { return first.finish == FinishReason::kNone; });
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
      if (running_.empty() && !std::exchange(freed_, false))
        wake_.wait_for(lock, kIdleWait, [&] { return woken_ || stopping_; });
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
  for (auto& sequence : inbox_) {
    sequence->order = next_order_++;
    waiting_.push_back(std::move(sequence));
  }
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

// In the order in which they came: one that finds no room holds up those behind it, which could not grow either. One
// that is choosing of its prompt, or replays, does not: it runs a slice between two steps of the batch.
void DecodeEngine::AdmitWaiting() {
  size_t rows = 0;
  for (const auto& sequence : running_) rows += sequence->num_active();
  bool asked_alone = false, ran_slice = false;
  int64_t gathered = 0;
  for (size_t i = 0; i < waiting_.size();) {
    Sequence& next = *waiting_[i];
    if (rows + next.num_rows() > static_cast<size_t>(options_.executor.max_rows)) break;
    absl::Status status = next.parked == nullptr ? absl::OkStatus() : Return(next);
    const bool starts = status.ok() && !next.started();
    if (starts && (next.has_to_choose() || next.has_to_replay())) {
      if (!ran_slice) status = next.has_to_choose() ? ChooseSlice(next) : ReplaySlice(next);
      ran_slice = freed_ = true;
      if (status.ok() && (next.has_to_choose() || next.has_to_replay())) {
        ++i;
        continue;
      }
    }
    if (starts && status.ok()) {
      const int64_t own = next.gathered_tokens();
      if (own > 0 && gathered > 0 && gathered + own > options_.gathered_tokens) {
        freed_ = true;
        break;
      }
      status = Start(next);
      if (status.ok()) gathered += own;
    }
    if (status.code() == absl::StatusCode::kResourceExhausted) {
      if (!running_.empty()) break;  // what they hold comes back
      if (FindRoomFor(next)) continue;
      if (!IsAlone(next)) break;                        // what is reserved is committed, or expires
      if (!std::exchange(asked_alone, true)) continue;  // others may have left the pool since
      ++preemptions_;
      status = absl::UnavailableError("preempted: the decode worker's KV pool is too small for this sequence");
    }
    std::unique_ptr<Sequence> sequence = std::move(waiting_[i]);
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
    asked_alone = false;
    if (!status.ok()) {
      Finish(*sequence, status);
    } else if (sequence->num_active() == 0) {
      Finish(*sequence, absl::OkStatus());  // every first token ended its continuation
    } else {
      rows += sequence->num_active();
      if (starts && sequence->request.on_start) sequence->request.on_start();
      const auto younger = std::find_if(running_.begin(), running_.end(),
                                        [&](const auto& other) { return other->order > sequence->order; });
      running_.insert(younger, std::move(sequence));
    }
  }
  RemoveFinished();
}

absl::Status DecodeEngine::ReplaySlice(Sequence& sequence) {
  DecodeRequest& request = sequence.request;
  SPLICE_ASSIGN_OR_RETURN(const auto selector, MakeSelectorFor(*request.kv, request.decode, *model_));
  const auto rows_max = static_cast<size_t>(options_.executor.max_rows);
  const size_t num_rows = std::min(request.replay.size() - 1, rows_max);  // the last one is the next step's
  const int64_t begin = request.kv->num_tokens(), end = begin + static_cast<int64_t>(num_rows);
  SPLICE_RETURN_IF_ERROR(request.kv->Reserve(end));
  std::vector<DecodeRow> rows;
  for (size_t i = 0; i < num_rows; ++i)
    rows.push_back({.token = request.replay[i],
                    .kv = request.kv.get(),
                    .selector = selector.get(),
                    .at = begin + static_cast<int64_t>(i)});
  SPLICE_RETURN_IF_ERROR(executor_->Decode(rows));
  request.kv->set_num_tokens(end);
  const auto ran = request.replay.begin() + static_cast<std::ptrdiff_t>(num_rows);
  request.prior_output.insert(request.prior_output.end(), request.replay.begin(), ran);
  request.replay.erase(request.replay.begin(), ran);
  request.first_tokens[0].token = request.replay[0];
  return absl::OkStatus();
}

absl::Status DecodeEngine::ChooseSlice(Sequence& sequence) {
  const auto choose = [&]() -> absl::Status {
    if (sequence.choice == nullptr) {
      SPLICE_ASSIGN_OR_RETURN(sequence.chooser,
                              MakeSelectorFor(*sequence.request.kv, sequence.request.decode, *model_));
      SPLICE_ASSIGN_OR_RETURN(sequence.choice, PromptChoice::Begin(*executor_, sequence.tokens(), *sequence.request.kv,
                                                                   *sequence.chooser->of_prompt()));
    }
    if (!sequence.choice->done()) SPLICE_RETURN_IF_ERROR(sequence.choice->RunSlice());
    return absl::OkStatus();
  };
  const absl::Status status = choose();
  if (status.ok() && !sequence.choice->done()) return status;
  if (status.ok()) sequence.of_prompt = sequence.choice->Take();
  sequence.DropChoice();
  return status;
}

void DecodeEngine::Queue(std::unique_ptr<Sequence> sequence) {
  const auto younger =
      std::find_if(waiting_.begin(), waiting_.end(), [&](const auto& other) { return other->order > sequence->order; });
  waiting_.insert(younger, std::move(sequence));
}

bool DecodeEngine::IsAlone(const Sequence& sequence) const {
  std::vector<int64_t> others_free(static_cast<size_t>(pool_.view().num_ranks()), pool_.view().pages_per_rank());
  if (sequence.parked == nullptr) {
    const std::vector<int64_t> own = sequence.Holders().PagesByRank(pool_);
    for (size_t r = 0; r < own.size(); ++r) others_free[r] -= own[r];
  }
  return pool_.HasFree(others_free);
}

void DecodeEngine::Park(Sequence& sequence) {
  ++preemptions_;
  sequence.DropChoice();
  const PageHolders holders = sequence.Holders();
  const size_t bytes = holders.Pages(pool_).size() * pool_.view().page_bytes();
  absl::Status status;
  if (parked_bytes_ + bytes > options_.parked_bytes) {
    status = absl::ResourceExhaustedError("no host memory for its KV is left");
  } else if (auto parked = ParkedPages::Park(pool_, holders); parked.ok()) {
    sequence.parked = *std::move(parked);
    parked_bytes_ += bytes;
    return;
  } else {
    status = parked.status();
  }
  Finish(sequence, Errorf(absl::StatusCode::kUnavailable, "preempted: the decode worker's KV pool is full, and {}",
                          MessageOf(status)));
}

absl::Status DecodeEngine::Return(Sequence& sequence) {
  std::vector<int64_t> spare(static_cast<size_t>(pool_.view().num_ranks()));
  const int64_t streams = KvShapeOf(model_->config()).num_streams() / pool_.view().num_ranks();
  // Alone it returns without: whether it can grow is seen when it does.
  for (const Fork& fork : sequence.forks) {
    if (fork.finished || IsAlone(sequence)) continue;
    for (int64_t& pages : spare) pages += fork.GrowthPages(streams);
  }
  const size_t bytes = sequence.parked->bytes();
  SPLICE_RETURN_IF_ERROR(sequence.parked->Return(sequence.Holders(), spare));
  sequence.parked.reset();
  parked_bytes_ -= bytes;
  return absl::OkStatus();
}

bool DecodeEngine::FindRoomFor(Sequence& needy) {
  for (size_t i = waiting_.size(); i-- > 0 && waiting_[i]->order > needy.order;) {
    if (!waiting_[i]->runs()) continue;
    Park(*waiting_[i]);
    if (waiting_[i]->done) waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
    return true;
  }
  for (size_t i = running_.size(); i-- > 0;) {
    Sequence& youngest = *running_[i];
    if (!youngest.runs()) continue;
    if (&youngest == &needy && IsAlone(needy)) return false;
    Park(youngest);
    return true;
  }
  return false;
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

// Pages that the forks take at most beside those of the sequence.
bool DecodeEngine::HasRoomToStart(const Sequence& sequence) const {
  const DecodeRequest& request = sequence.request;
  const KvShape shape = KvShapeOf(model_->config());
  const int num_ranks = pool_.view().num_ranks();
  const int64_t num_tokens = request.kv->num_tokens(), copies = request.sampling.num_forks - 1;
  const bool copies_pages = num_tokens % kernels::kPageTokens != 0;
  std::vector<int64_t> needed(static_cast<size_t>(num_ranks),
                              copies_pages ? copies * shape.num_streams() / num_ranks : 0);
  const auto selector = MakeSelectorFor(*request.kv, request.decode, *model_);
  SPLICE_CHECK(selector.ok(), "a selector that Submit has checked");
  if (const auto compact = CompactNeedsOf(**selector, *model_, num_tokens); compact.has_value()) {
    const auto of_fork = CompactPages::PagesByRank(shape, *compact, num_ranks, num_tokens + 1);
    for (size_t r = 0; r < needed.size(); ++r)
      needed[r] += of_fork[r] * (copies + (request.compact == nullptr ? 1 : 0));
  }
  return pool_.HasFree(needed);
}

absl::Status DecodeEngine::Start(Sequence& sequence) {
  if (!HasRoomToStart(sequence) && !IsAlone(sequence))
    return absl::ResourceExhaustedError("no pages for the continuations");
  const absl::Status status = MakeForks(sequence);
  if (status.ok()) {
    sequence.request.kv.reset();
    sequence.request.heads.reset();
    sequence.of_prompt.reset();
  } else {
    sequence.forks.clear();
    sequence.restores.clear();
  }
  return status;
}

// The forks share the prompt's full pages. The last one takes the sequence's own KV, once nothing can fail any more.
absl::Status DecodeEngine::MakeForks(Sequence& sequence) {
  DecodeRequest& request = sequence.request;
  const ModelConfig& config = model_->config();
  const int64_t num_prompt = request.kv->num_tokens() - static_cast<int64_t>(request.prior_output.size());
  const int32_t n = request.sampling.num_forks;
  const std::shared_ptr<const StreamClasses> classes = request.kv->classes();
  const std::shared_ptr<HeadSource> heads = request.heads;
  if (heads != nullptr) {
    sequence.restores.resize(static_cast<size_t>(n));
    request.kv->FreezeHoles();  // before it is copied
  }
  for (int32_t i = 0; i < n; ++i) {
    Fork fork{.index = i};
    const SampledToken& first = request.first_tokens[i];
    fork.last_token = first.token;
    if (!request.replay.empty()) fork.replay.assign(request.replay.begin() + 1, request.replay.end());
    fork.finished = first.finish != FinishReason::kNone;
    if (!fork.finished) {
      SPLICE_ASSIGN_OR_RETURN(fork.selector, MakeSelectorFor(*request.kv, request.decode, *model_));
      const int64_t num_tokens = request.kv->num_tokens();
      absl::Status status = TakeCompactPages(request, fork);
      if (status.ok()) status = BeginLists(*model_, pool_, *fork.selector, num_tokens, fork.compact.get());
      SPLICE_RETURN_IF_ERROR(status);
      if (PromptSelector* const selector = fork.selector->of_prompt(); selector != nullptr) {
        status = fork.compact->Reserve(num_tokens + 1);
        if (status.ok())
          status = KeepPositions(*model_, pool_, *sequence.of_prompt, num_tokens, *selector, *fork.compact);
        SPLICE_RETURN_IF_ERROR(status);
      }
      fork.sampler = std::make_unique<Sampler>(request.sampling, config.eos_ids, i, request.prompt,
                                               request.prior_output, num_prompt, config.max_positions);
      fork.sampler->Accept(first.token);
      // What was left out cannot be attended to for comparison.
      if (request.kv->kept() == nullptr) fork.watched = fidelity_.Draw(*fork.selector, classes);
      if (i + 1 < n) {
        SPLICE_ASSIGN_OR_RETURN(fork.kv, request.kv->Fork());
      } else {
        fork.kv = std::move(request.kv);
      }
      if (heads != nullptr)
        fork.restorer = std::make_unique<HeadRestorer>(request.restore, config, *model_->head_classes(), heads,
                                                       *fork.kv, sequence.restores[static_cast<size_t>(i)]);
    }
    sequence.forks.push_back(std::move(fork));
  }
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
  for (const auto& sequence : running_) {
    for (Fork& fork : sequence->forks) {
      while (sequence->runs() && !fork.finished && !fork.Grow().ok()) {
        // Alone in the pool it asks once more: others may have left it since.
        if (FindRoomFor(*sequence) || fork.Grow().ok() || !IsAlone(*sequence)) continue;
        ++preemptions_;
        Finish(*sequence,
               absl::UnavailableError("preempted: the decode worker's KV pool is too small for this sequence"));
      }
    }
  }
  for (auto& sequence : running_) {
    if (sequence->parked != nullptr && !sequence->done) Queue(std::move(sequence));
  }
  std::erase(running_, nullptr);
  RemoveFinished();
}

void DecodeEngine::RunStep() {
  const auto start = Clock::now();
  // One step serves all but those whose ways of choosing tokens are too many for it.
  struct Group {
    std::vector<ScoringPlan> plans;  // ways of choosing, each once
    std::vector<Running> forks;
  };
  std::vector<Group> groups;
  for (auto& sequence : running_) {
    for (Fork& fork : sequence->forks) {
      if (fork.finished) continue;
      const ScoringPlan plan = fork.selector->scoring();
      const auto has = [&](const Group& group) {
        return plan.scoring == TokenScoring::kNone ||
               std::any_of(group.plans.begin(), group.plans.end(),
                           [&](const ScoringPlan& other) { return plan.SharesStep(other); });
      };
      const auto fits = [&](const Group& group) {
        return has(group) || group.plans.size() < static_cast<size_t>(kernels::kSelectionPlansMax);
      };
      auto group = std::find_if(groups.begin(), groups.end(), fits);
      if (group == groups.end()) group = groups.insert(groups.end(), Group());
      if (!has(*group)) group->plans.push_back(plan);
      group->forks.push_back({sequence.get(), &fork});
    }
  }
  for (const auto& [plans, forks] : groups) {
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
    samplers.push_back(fork->replay.empty() ? fork->sampler.get() : nullptr);
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
      const bool replays = !fork.replay.empty();
      if (replays) {
        sampled[i].token = fork.replay.front();
        fork.replay.pop_front();
        fork.sampler->Accept(sampled[i].token);
      }
      fork.last_token = sampled[i].token;
      ++fork.num_output;
      fork.finished = sampled[i].finish != FinishReason::kNone;
      if (fork.restorer != nullptr && !fork.finished) fork.restorer->EndStep(*fork.kv, keep_free);
      if (fork.finished) {
        fork.restorer.reset();
        fork.kv.reset();
        fork.compact.reset();
      }
      if (!replays) tokens.push_back({fork.index, std::move(sampled[i])});
    }
    sequence.TellRestores();
    if (!tokens.empty()) sequence.request.on_tokens(std::move(tokens));
    if (sequence.num_active() == 0) Finish(sequence, absl::OkStatus());
  }
  return absl::OkStatus();
}

// Frees the pages first, so that whoever hears of the end finds them free.
void DecodeEngine::Finish(Sequence& sequence, const absl::Status& status) {
  if (sequence.done) return;
  sequence.done = freed_ = true;
  if (sequence.parked != nullptr) parked_bytes_ -= sequence.parked->bytes();
  sequence.parked.reset();
  sequence.DropChoice();
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
  load_.parked = static_cast<size_t>(
      std::count_if(waiting_.begin(), waiting_.end(), [](const auto& s) { return s->parked != nullptr; }));
  load_.parked_bytes = parked_bytes_;
  load_.preemptions = preemptions_;
}

}  // namespace spl::engine
