#include "services/engine/runtime/prefill_passes.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>
#include <span>
#include <utility>

#include "services/base/fault_point.h"
#include "services/base/status.h"
#include "services/engine/runtime/device_lost.h"
#include "services/engine/runtime/pass_rows.h"

namespace spl::engine {
namespace {

using Clock = std::chrono::steady_clock;

FaultPoint step_fault("engine.prefill.step");

// Short prompts wait for others for so long, where at least so many sequences are decoded.
constexpr std::chrono::milliseconds kGatherTime{25};
constexpr size_t kManyRiders = 64;

double Seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

size_t NumThatContinue(std::span<const std::shared_ptr<PrefillJob>> jobs) {
  return std::count_if(jobs.begin(), jobs.end(), [](const auto& job) { return job->request.continues_here; });
}

}  // namespace

int32_t PrefillPasses::Pass::num_prompt_rows() const {
  int32_t rows = 0;
  for (const PrefillSlice& slice : slices) rows += static_cast<int32_t>(slice.tokens.size());
  return rows;
}

int32_t PrefillPasses::Pass::num_riders() const {
  return riders == nullptr ? 0 : static_cast<int32_t>(riders->rows.size());
}

// A pass of few prompt rows that takes a large step along costs more than the recorded step: short prompts gather for a
// few steps.
bool PrefillPasses::CanWait() const {
  if (options_.shared == nullptr || options_.turns == nullptr || options_.turns->num_offered() < kManyRiders ||
      meter_.load(0).queued_tokens >= kWeightBoundRows)
    return false;
  const auto now = Clock::now();
  const std::vector<Job> jobs = queue_.RunningInOrder(now);
  return std::all_of(jobs.begin(), jobs.end(),
                     [&](const Job& job) { return now - job->stats.submitted < kGatherTime; });
}

std::vector<PrefillPasses::Ended> PrefillPasses::RunNext() {
  if (CanWait()) {
    options_.turns->WaitForStep(kGatherTime);
    return {};  // more may have come
  }
  const StepTurns::Turn turn = StepTurns::TakeOf(options_.turns.get(), StepTurns::Work::kPrompts);
  const auto start = Clock::now();
  (void)step_fault.Hit();
  std::vector<Ended> ended;
  Pass pass = Choose(ended);
  if (pass.jobs.empty()) return ended;
  Board(pass);
  absl::Status status = Run(pass);
  if (status.code() == absl::StatusCode::kCancelled) {
    Land(pass, status);  // whoever cancelled the prompts ends them
    return ended;
  }
  double tokens = 0, cost = 0;
  if (status.ok()) status = ScorePrompts(pass);
  if (status.ok()) status = Count(pass, tokens, cost);
  if (!status.ok()) {
    Land(pass, status);
    ended.push_back({std::move(pass.jobs), status});
    return ended;
  }
  if (options_.turns != nullptr) options_.turns->NotePrompts(static_cast<int64_t>(tokens));
  if (options_.on_pass != nullptr) options_.on_pass(pass.num_prompt_rows(), pass.num_riders());
  // The time that log-probabilities of some prompts take says nothing of others.
  const bool counts = std::none_of(pass.jobs.begin(), pass.jobs.end(),
                                   [](const Job& job) { return job->request.prompt_logprobs.has_value(); });
  const bool shared = pass.riders != nullptr;
  Finish(pass, ended);
  const std::chrono::nanoseconds took = Clock::now() - start;
  if (counts) meter_.Add(tokens, cost, Seconds(took));
  if (shared) {
    shared_pass_time_ += (took - shared_pass_time_) / (shared_pass_time_.count() == 0 ? 1 : 4);
  }
  return ended;
}

absl::Status PrefillPasses::ScorePrompts(const Pass& pass) {
  int32_t first_row = 0;
  for (size_t i = 0; i < pass.jobs.size(); ++i) {
    PrefillJob& job = *pass.jobs[i];
    if (job.request.prompt_logprobs.has_value() && !job.cancelled())
      SPLICE_RETURN_IF_ERROR(prompt_logprobs_.Add(executor_, job.request.tokens, pass.slices[i], first_row,
                                                  *job.request.prompt_logprobs, job.prompt_logprobs));
    first_row += static_cast<int32_t>(pass.slices[i].tokens.size());
  }
  return absl::OkStatus();
}

absl::Status PrefillPasses::Count(const Pass& pass, double& tokens, double& cost) {
  for (size_t i = 0; i < pass.jobs.size(); ++i) {
    PrefillJob& job = *pass.jobs[i];
    const double done = job.run->pass_work();
    tokens += done;
    cost += meter_.cost().Of(pass.slices[i].positions, pass.layers.layers.begin, pass.layers.layers.end);
    meter_.SetQueued(job.queued, job.queued - std::min(job.queued, static_cast<int64_t>(done)));
    SPLICE_RETURN_IF_ERROR(job.FinishPass(executor_));
  }
  if (options_.turns == nullptr || options_.turns->sharing() == StepTurns::Sharing::kRides) return absl::OkStatus();
  // The device has done the slice when another engine's turn comes.
  SPLICE_ASSIGN_OR_RETURN(const std::shared_ptr<const kernels::Fence> fence, executor_.RecordFenceOfAll());
  return fence == nullptr ? absl::OkStatus() : fence->Wait();
}

// Runs all layers for all rows and is done.
bool PrefillPasses::IsPlain(const PassLayers& layers) const {
  return layers == PassLayers{{0, model_.config().num_layers}};
}

// Prompts that are not plain have the slices that they would have without company: a method's choice may depend on
// where a slice ends.
int32_t PrefillPasses::RowsOfNext(bool plain) const {
  PassDemand demand{.most = executor_.max_rows()};
  const int32_t slice = options_.slice_tokens > 0 ? std::min(options_.slice_tokens, demand.most) : demand.most;
  if (!plain || options_.turns == nullptr) return slice;
  const PrefillLoad load = meter_.load(0);
  const bool rides = options_.turns->sharing() == StepTurns::Sharing::kRides;
  if (options_.shared != nullptr) demand.riders = static_cast<int32_t>(options_.turns->num_riders());
  demand.least = rides ? kRowsOfFullSpeed : kWeightBoundRows;
  demand.time = demand.riders > 0 ? options_.turns->itl_target() : options_.turns->TimeToDecode();
  demand.rows_per_s = load.tokens_per_s;
  demand.rows_per_token = options_.turns->PromptRowsPerToken();
  demand.waiting = load.queued_tokens;
  demand.shared_pass_time = shared_pass_time_;
  return std::min(RowsOfPass(demand), slice);
}

int32_t PrefillPasses::RowsBesideFetch(PrefillJob& job, int32_t room) {
  room = RowsWhileFetching(job.fetch->SecondsLeft(Clock::now()), meter_.load(0).tokens_per_s, room);
  const int32_t rows = job.MeetFetch(room);
  if (!job.overlaps()) meter_.SetQueued(job.queued, static_cast<int64_t>(std::ceil(job.run->remaining_work())));
  return rows;
}

PrefillPasses::Pass PrefillPasses::Choose(std::vector<Ended>& ended) {
  Pass pass;
  int32_t room = 0;
  for (const Job& job : queue_.RunningInOrder(Clock::now())) {
    if (job->run == nullptr) {
      if (const absl::Status started = job->StartRun(local_, executor_); !started.ok()) {
        ended.push_back({{job}, started});
        if (IsDeviceLost(started)) return {};
        continue;  // the others of the step do not depend on it
      }
      meter_.SetQueued(job->queued, static_cast<int64_t>(std::ceil(job->run->remaining_work())));
    }
    if (!pass.jobs.empty() && (job->run->alone() || job->run->layers() != pass.layers)) continue;
    if (pass.jobs.empty()) room = RowsOfNext(job->run->exact() && !job->run->alone() && IsPlain(job->run->layers()));
    if (room <= 0) continue;  // begun, for what is cached is announced; its rows come with a later pass
    const PrefillSlice slice = job->NextSlice(job->overlaps() ? RowsBesideFetch(*job, room) : room);
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
void PrefillPasses::Board(Pass& pass) {
  if (options_.shared == nullptr || options_.turns == nullptr) return;
  const int64_t rows = static_cast<int64_t>(options_.turns->num_offered()) + pass.num_prompt_rows();
  const bool plain =
      IsPlain(pass.layers) && std::all_of(pass.slices.begin(), pass.slices.end(),
                                          [](const PrefillSlice& slice) { return slice.observers == nullptr; });
  if (!plain || rows > executor_.max_rows()) return options_.turns->CannotBoard();
  pass.riders = options_.turns->Board();
}

// The host describes the logits and samples of such a pass while the device is at it: none of its prompts reads results
// before.
bool PrefillPasses::MayRunBehindHost(const Pass& pass) const {
  return IsPlain(pass.layers) && std::all_of(pass.jobs.begin(), pass.jobs.end(), [](const Job& job) {
           return job->run->exact() && !job->run->alone() && !job->request.prompt_logprobs.has_value();
         });
}

absl::Status PrefillPasses::Run(const Pass& pass) {
  int32_t layers_a_fence = 0;  // the fewest that a prompt asks for; 0: none wants to know
  for (const Job& job : pass.jobs) {
    if (!job->request.on_layer) continue;
    layers_a_fence =
        layers_a_fence == 0 ? job->request.layers_a_fence : std::min(layers_a_fence, job->request.layers_a_fence);
  }
  int32_t first = pass.layers.layers.begin;  // layer that is still to be announced
  const int32_t end =
      pass.layers.layers.end - (pass.layers.keys_only_last ? 1 : 0);  // behind the last that on_layer comes for
  const auto on_layer = [&](int32_t layer) {
    const bool announces = layers_a_fence > 0 && (layer + 1 - first >= layers_a_fence || layer + 1 == end);
    const std::shared_ptr<const kernels::Fence> fence = announces ? executor_.RecordFence() : nullptr;
    bool any_alive = pass.riders != nullptr;
    for (const Job& job : pass.jobs) {
      any_alive |= !job->cancelled();
      for (int32_t written = first; announces && written <= layer; ++written) job->AnnounceLayer(written, fence);
    }
    if (announces) first = layer + 1;
    return any_alive;
  };
  return executor_.Prefill(
      pass.slices, pass.layers, on_layer, pass.riders == nullptr ? std::span<const DecodeRow>() : pass.riders->rows,
      MayRunBehindHost(pass) ? ParallelExecutor::Until::kLaunched : ParallelExecutor::Until::kDone);
}

// The logits of prompts that have an answer, and of the step that shared the pass, are one product. On return the pass
// is complete.
void PrefillPasses::Finish(Pass& pass, std::vector<Ended>& ended) {
  std::vector<Ended> done;
  std::vector<int32_t> last_rows;
  std::vector<Job> complete;
  int32_t row = 0;
  for (size_t i = 0; i < pass.jobs.size(); ++i) {
    const Job& job = pass.jobs[i];
    row += static_cast<int32_t>(pass.slices[i].tokens.size());
    if (!job->run->done()) continue;
    job->EndRun();
    if (job->publish) {
      done.push_back({{job}, absl::OkStatus()});
    } else {
      last_rows.push_back(row - 1);
      complete.push_back(job);
    }
  }
  for (size_t i = 0; pass.riders != nullptr && i < pass.riders->rows.size(); ++i)
    last_rows.push_back(row + static_cast<int32_t>(i));
  absl::Status status;
  if (!last_rows.empty()) {
    status = executor_.ComputeLogits(last_rows);
    if (status.ok()) status = SampleTokens(complete, pass.riders);
  }
  // A pass that failed is noticed here, and none of its prompts has its KV.
  const absl::Status ran = status.ok() && !last_rows.empty() ? status : executor_.Synchronize();
  if (options_.turns != nullptr && status.ok()) options_.turns->ExpectJoins(NumThatContinue(complete));
  Land(pass, status.ok() ? ran : status);
  if (!ran.ok()) return ended.push_back({std::move(pass.jobs), ran});
  std::move(done.begin(), done.end(), std::back_inserter(ended));
  if (!complete.empty()) ended.push_back({std::move(complete), status});
}

absl::Status PrefillPasses::SampleTokens(const std::vector<Job>& jobs, StepOffer* riders) {
  std::vector<std::vector<Sampler>> firsts;
  std::vector<Sampler*> samplers;
  std::vector<int32_t> rows;
  for (const auto& job : jobs) {
    const std::span<const int32_t> tokens(job->request.tokens);
    const size_t prior = job->request.num_output_tokens;
    firsts.push_back(ForkSamplers(job->request.sampling, model_.config().eos_ids, tokens.first(tokens.size() - prior),
                                  tokens.last(prior), model_.config().max_positions));
    for (Sampler& sampler : firsts.back()) samplers.push_back(&sampler);
    rows.resize(samplers.size(), static_cast<int32_t>(firsts.size()) - 1);
  }
  if (riders != nullptr) {
    samplers.insert(samplers.end(), riders->samplers.begin(), riders->samplers.end());
    for (size_t i = 0; i < riders->rows.size(); ++i) rows.push_back(static_cast<int32_t>(jobs.size() + i));
  }
  SPLICE_ASSIGN_OR_RETURN(std::vector<SampledToken> sampled, row_sampler_.Sample(executor_, samplers, rows));
  auto token = std::make_move_iterator(sampled.begin());
  for (size_t i = 0; i < jobs.size(); ++i) {
    const auto end = token + static_cast<std::ptrdiff_t>(firsts[i].size());
    jobs[i]->first_tokens.assign(token, end);
    token = end;
  }
  if (riders != nullptr) riders->sampled.assign(token, std::make_move_iterator(sampled.end()));
  return GiveFirstLogits(jobs);
}

absl::Status PrefillPasses::GiveFirstLogits(const std::vector<Job>& jobs) {
  for (size_t i = 0, vocab = model_.config().vocab_size; i < jobs.size(); ++i) {
    if (!jobs[i]->request.return_first_logits) continue;
    SPLICE_ASSIGN_OR_RETURN(const std::span<const float> logits, executor_.Logits());
    jobs[i]->first_logits.assign(logits.begin() + i * vocab, logits.begin() + (i + 1) * vocab);
  }
  return absl::OkStatus();
}

void PrefillPasses::Land(Pass& pass, const absl::Status& computed) {
  StepOffer* const riders = std::exchange(pass.riders, nullptr);
  if (riders == nullptr) return;
  riders->status = computed;
  options_.turns->Land(*riders);
}

}  // namespace spl::engine
