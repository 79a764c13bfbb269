#include "services/engine/runtime/decode_step.h"

#include <algorithm>
#include <ctime>
#include <iterator>
#include <utility>

#include "services/base/check.h"
#include "services/base/fault_point.h"
#include "services/base/status.h"
#include "services/engine/methods/selection_methods.h"
#include "services/engine/runtime/device_lost.h"
#include "services/engine/runtime/local_generator.h"
#include "services/engine/selection/adaptive.h"

namespace spl::engine {
namespace {

FaultPoint step_fault("engine.decode_step");

// CPU time of the calling thread: what it waits for, or whoever else has the core, does not count.
double ThreadCpuSeconds() {
  timespec time = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

StepKind KindOf(TokenSelector& selector) {
  const AdaptiveSelector* const adaptive = selector.adaptive();
  if (adaptive == nullptr) return StepKind::kFixed;
  return adaptive->chooses() ? StepKind::kChosen : StepKind::kDense;
}

// Every row has drawn.
std::vector<std::optional<SampledToken>> Each(std::vector<SampledToken> sampled) {
  return {std::make_move_iterator(sampled.begin()), std::make_move_iterator(sampled.end())};
}

}  // namespace

DecodeStep::DecodeStep(ParallelExecutor& executor, DecodeBatch& batch, AdaptiveDecoding& adaptive,
                       DecodeFidelity& fidelity, TokenDelivery& delivery, bool async, OnPass on_pass)
    : model_(executor.model()),
      executor_(executor),
      batch_(batch),
      adaptive_(adaptive),
      fidelity_(fidelity),
      delivery_(delivery),
      async_(async),
      on_pass_(std::move(on_pass)) {}

bool DecodeStep::Group::Has(const ScoringPlan& plan) const {
  return plan.scoring == TokenScoring::kNone ||
         std::any_of(plans.begin(), plans.end(), [&](const ScoringPlan& other) { return plan.SharesStep(other); });
}

void DecodeStep::Group::Add(const ScoringPlan& plan) {
  if (!Has(plan)) plans.push_back(plan);
}

bool DecodeStep::Group::Fits(const TokenSelector& selector) const {
  size_t more = Has(selector.scoring()) ? 0 : 1;
  if (selector.outer() != nullptr && !Has(selector.outer()->scoring)) ++more;
  return more == 0 || plans.size() + more <= static_cast<size_t>(kernels::kSelectionPlansMax);
}

void DecodeStep::MakeGroups() {
  num_groups_ = 0;
  adaptive_.Decide(batch_);
  for (auto& sequence : batch_.running()) {
    for (DecodeFork& fork : sequence->forks) {
      if (fork.finished || fork.EndsInFlight()) continue;
      const TokenSelector& selector = *fork.selector;
      const auto end = groups_.begin() + static_cast<std::ptrdiff_t>(num_groups_);
      auto group = std::find_if(groups_.begin(), end, [&](const Group& g) { return g.Fits(selector); });
      if (group == end) {
        if (num_groups_ == groups_.size()) groups_.emplace_back();
        group = groups_.begin() + static_cast<std::ptrdiff_t>(num_groups_++);
        group->plans.clear();
        group->rows.clear();
      }
      group->Add(selector.scoring());
      if (selector.outer() != nullptr) group->Add(selector.outer()->scoring);
      group->rows.push_back({sequence.get(), &fork, fork.stopped_choosing ? StepKind::kDense : KindOf(*fork.selector)});
    }
  }
}

absl::Status DecodeStep::Run() {
  MakeGroups();
  if (MayRunAhead()) return RunAhead();
  if (under_way()) {
    SPLICE_RETURN_IF_ERROR(TakeUnderWay());
    MakeGroups();
  }
  for (size_t g = 0; g < num_groups_; ++g) {
    if (const absl::Status status = RunTogether(groups_[g].rows); !status.ok())
      SPLICE_RETURN_IF_ERROR(Fail(groups_[g].rows, status));
  }
  return absl::OkStatus();
}

// Rows that need the host in front of their layers, or that a step cannot have beside others, make it wait. What a
// selector chooses from depends on positions alone.
bool DecodeStep::MayRunAhead() const {
  if (!async_ || num_groups_ > 1) return false;
  const std::span<const Row> rows = num_groups_ == 0 ? std::span<const Row>() : groups_[0].rows;
  if (RowToMeasure(rows) >= 0) return false;
  return std::all_of(rows.begin(), rows.end(), [](const Row& row) {
    const DecodeFork& fork = *row.fork;
    return fork.watched == nullptr && fork.replay.empty() && (fork.kv->is_whole() || fork.kv->is_moved());
  });
}

// The one that waits longest. Measurements keep their distance: a step with one is slow.
int64_t DecodeStep::RowToMeasure(std::span<const Row> rows) const {
  if (measured_step_ > 0 && num_steps_ < measured_step_ + MassGuard::kSpacing) return -1;
  int64_t longest = -1, row = -1;
  for (size_t i = 0; i < rows.size(); ++i) {
    const DecodeFork& fork = *rows[i].fork;
    if (rows[i].kind != StepKind::kChosen || fork.guard == nullptr || fork.watched != nullptr) continue;
    const int64_t kv_len = fork.num_positions() + 1, waited = kv_len - fork.guard->measured();
    if (!fork.guard->IsDue(kv_len) || waited <= longest) continue;
    longest = waited;
    row = static_cast<int64_t>(i);
  }
  return row;
}

absl::Status DecodeStep::RunAhead() {
  Flight last = std::exchange(flight_, {});
  absl::Status started = num_groups_ == 0 ? absl::OkStatus() : StartLayers(groups_[0].rows, flight_);
  const absl::Status taken = Take(last);
  if (taken.ok()) {
    if (started.ok()) started = StartSampling(flight_);
    return started.ok() ? started : Fail(std::exchange(flight_, {}).rows, started);
  }
  // What was started behind a pass that failed has read its tokens.
  last.rows.insert(last.rows.end(), flight_.rows.begin(), flight_.rows.end());
  flight_ = {};
  return Fail(last.rows, taken);
}

absl::Status DecodeStep::TakeUnderWay() {
  Flight last = std::exchange(flight_, {});
  const absl::Status taken = Take(last);
  return taken.ok() ? taken : Fail(last.rows, taken);
}

absl::Status DecodeStep::Take(Flight& flight) {
  SPLICE_ASSIGN_OR_RETURN(const SampledBatch batch, flight.sample.Wait());
  SPLICE_ASSIGN_OR_RETURN(const KeptMass mass, flight.mass.Wait());
  TakeMass(flight.rows, mass);
  TakeTokens(flight.rows, batch);
  return absl::OkStatus();
}

absl::Status DecodeStep::StartLayers(std::span<const Row> rows, Flight& flight) {
  flight.rows.assign(rows.begin(), rows.end());
  SPLICE_RETURN_IF_ERROR(step_fault.Hit().status);
  if (const double ended = std::exchange(model_ended_s_, 0); ended > 0) host_s_ += ThreadCpuSeconds() - ended;
  DescribeRows(rows);
  SPLICE_RETURN_IF_ERROR(executor_.Decode(decode_rows_));
  for (size_t i = 0; i < rows.size(); ++i) {
    ++rows[i].fork->in_flight;
    rows[i].fork->flight_row = static_cast<int32_t>(i);
  }
  return absl::OkStatus();
}

// Penalties and masks depend on the tokens of the step in front. The host has prepared them long before the layers of
// this step are done.
absl::Status DecodeStep::StartSampling(Flight& flight) {
  if (flight.rows.empty()) return absl::OkStatus();
  samplers_.clear();
  for (const Row& row : flight.rows) samplers_.push_back(row.fork->finished ? nullptr : row.fork->sampler.get());
  SPLICE_ASSIGN_OR_RETURN(flight.sample, row_sampler_.Begin(executor_, samplers_));
  SPLICE_ASSIGN_OR_RETURN(flight.mass, executor_.BeginMass());
  return absl::OkStatus();
}

absl::Status DecodeStep::Fail(std::span<const Row> rows, const absl::Status& status) {
  // The device writes no pages that are given back.
  (void)executor_.Synchronize();
  for (const Row& row : rows) row.fork->in_flight = 0;
  if (IsDeviceLost(status)) {
    // Unavailable: the router starts the sequences again elsewhere, with the tokens they have.
    batch_.FinishAll(absl::UnavailableError(MessageOf(status)));
    batch_.RemoveFinished();
    return status;
  }
  // Whatever a step says, none of its requests is known to be at fault: each was checked when it came. Internal: the
  // router starts them again, too.
  const absl::Status ended = Errorf(absl::StatusCode::kInternal, "a step of the batch failed: {}", MessageOf(status));
  for (const Row& row : rows) batch_.Finish(*row.sequence, ended);
  return absl::OkStatus();
}

StepOffer* DecodeStep::Offer() {
  MakeGroups();
  if (num_groups_ != 1) return nullptr;
  const std::vector<Row>& rows = groups_[0].rows;
  if (std::any_of(rows.begin(), rows.end(), [](const Row& row) { return row.fork->watched != nullptr; }))
    return nullptr;
  DescribeRows(rows);
  if (!std::all_of(decode_rows_.begin(), decode_rows_.end(), CanRide)) return nullptr;
  offer_ = {.rows = decode_rows_, .samplers = samplers_};
  return &offer_;
}

absl::Status DecodeStep::Land() {
  const std::vector<Row>& rows = groups_[0].rows;
  absl::Status status = step_fault.Hit().status;
  if (status.ok()) status = offer_.status;
  if (!status.ok()) return Fail(rows, status);
  TakeTokens(rows, Each(std::move(offer_.sampled)));
  return absl::OkStatus();
}

void DecodeStep::DescribeRows(std::span<const Row> rows) {
  decode_rows_.clear();
  samplers_.clear();
  watched_.clear();
  for (const auto& [sequence, fork, kind] : rows) {
    decode_rows_.push_back(
        {.token = fork->last_token,
         .kv = fork->kv.get(),
         .selector = fork->selector.get(),
         .compact = fork->compact.get(),
         .estimates = kind == StepKind::kChosen && fork->guard != nullptr && fork->guard->estimates(),
         .at = fork->num_positions(),
         .token_of = fork->in_flight > 0 ? fork->flight_row : -1,
         .hot = fork->hot.get()});
    samplers_.push_back(fork->replay.empty() ? fork->sampler.get() : nullptr);
    watched_.push_back(fork->watched.get());
  }
}

absl::Status DecodeStep::RunTogether(std::span<const Row> rows) {
  SPLICE_RETURN_IF_ERROR(step_fault.Hit().status);
  SPLICE_ASSIGN_OR_RETURN(std::vector<SampledToken> sampled, RunModel(rows));
  if (on_pass_ != nullptr) on_pass_(0, static_cast<int32_t>(rows.size()));
  TakeTokens(rows, Each(std::move(sampled)));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<SampledToken>> DecodeStep::RunModel(std::span<const Row> rows) {
  DescribeRows(rows);
  if (const double ended = std::exchange(model_ended_s_, 0); ended > 0) host_s_ += ThreadCpuSeconds() - ended;
  SPLICE_RETURN_IF_ERROR(fidelity_.BeforeStep(executor_, decode_rows_, watched_));
  const int64_t measured = RowToMeasure(rows);
  if (measured >= 0) decode_rows_[measured].mass = rows[measured].fork->guard->Begin(decode_rows_[measured].kv_len());
  SPLICE_RETURN_IF_ERROR(executor_.Decode(decode_rows_));
  if (measured >= 0) {
    DecodeFork& fork = *rows[measured].fork;
    fork.guard->End(*fork.selector->adaptive(), decode_rows_[measured].kv_len());
    measured_step_ = num_steps_ + 1;
  }
  SPLICE_RETURN_IF_ERROR(fidelity_.AfterStep(executor_, decode_rows_));
  SPLICE_ASSIGN_OR_RETURN(auto sampled, row_sampler_.Sample(executor_, samplers_));
  SPLICE_ASSIGN_OR_RETURN(PendingMass pending, executor_.BeginMass());
  SPLICE_ASSIGN_OR_RETURN(const KeptMass mass, pending.Wait());
  TakeMass(rows, mass);
  model_ended_s_ = ThreadCpuSeconds();
  return sampled;
}

// Before the step's tokens are taken: the sequences have the positions that it did not write.
void DecodeStep::TakeMass(std::span<const Row> rows, const KeptMass& mass) {
  for (size_t i = 0; i < rows.size(); ++i) {
    DecodeFork& fork = *rows[i].fork;
    if (rows[i].kind != StepKind::kChosen || fork.finished || fork.guard == nullptr || !fork.guard->estimates())
      continue;
    fork.guard->Take(*fork.selector->adaptive(), fork.kv->num_tokens() + 1, mass, i);
  }
}

void DecodeStep::TakeTokens(std::span<const Row> rows, const SampledBatch& batch) {
  if (rows.empty()) return;
  model_ended_s_ = ThreadCpuSeconds();
  if (on_pass_ != nullptr) on_pass_(0, static_cast<int32_t>(rows.size()));
  std::vector<std::optional<SampledToken>> sampled(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    DecodeFork& fork = *rows[i].fork;
    --fork.in_flight;
    if (!fork.finished) sampled[i] = fork.sampler->Take(batch.rows[i], batch.top_of(i));
  }
  TakeTokens(rows, std::move(sampled));
}

void DecodeStep::TakeTokens(std::span<const Row> rows, std::vector<std::optional<SampledToken>> sampled) {
  ++num_steps_;
  // A page of every stream for each row: no running sequence is to give way to a head of another one.
  for (size_t i = 0; i < rows.size();) {
    DecodeSequence& sequence = *rows[i].sequence;
    const size_t begin = i;
    const bool replays = !rows[i].fork->replay.empty();  // then it has this one continuation
    for (; i < rows.size() && rows[i].sequence == &sequence; ++i) {
      if (sampled[i].has_value()) TakeToken(*rows[i].fork, *sampled[i]);
      if (rows[i].fork->finished && rows[i].fork->in_flight == 0) sequence.Free(*rows[i].fork);
    }
    for (size_t row = begin; row < i && !replays; ++row) {
      if (sampled[row].has_value())
        delivery_.AddToken(*sequence.listener,
                           {rows[row].fork->index, *std::move(sampled[row]), DescribeStep(rows[row])});
    }
    if (sequence.num_active() == 0 && !sequence.in_flight()) batch_.Finish(sequence, absl::OkStatus());
  }
}

StepChoice DecodeStep::DescribeStep(const Row& row) {
  StepChoice step{.kind = row.kind};
  if (row.fork->guard != nullptr) row.fork->guard->Describe(step);
  return step;
}

void DecodeStep::TakeToken(DecodeFork& fork, SampledToken& sampled) {
  fork.kv->set_num_tokens(fork.kv->num_tokens() + 1);
  if (!fork.replay.empty()) {
    sampled.token = fork.replay.front();
    fork.replay.pop_front();
    fork.sampler->Accept(sampled.token);
  }
  fork.last_token = sampled.token;
  ++fork.num_output;
  fork.finished = sampled.finish != FinishReason::kNone;
}

}  // namespace spl::engine
