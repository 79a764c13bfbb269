#include "services/engine/runtime/prefill_job.h"

#include <utility>

#include "services/base/fault_point.h"
#include "services/base/status.h"
#include "services/engine/cache/session_table.h"
#include "services/engine/methods/recovery_methods.h"
#include "services/engine/recovery/exact.h"
#include "services/engine/runtime/local_generator.h"
#include "services/engine/runtime/local_kv.h"
#include "services/engine/runtime/prompt_choice.h"
#include "services/engine/runtime/prompt_layout.h"
#include "services/engine/runtime/prompt_logprobs.h"
#include "services/methods/methods.h"

namespace spl::engine {
namespace {

FaultPoint begin_fault("engine.prefill.begin");

double Seconds(PrefillJob::Clock::duration d) { return std::chrono::duration<double>(d).count(); }

absl::Status CheckPrompt(std::span<const int32_t> tokens, std::span<const ReuseSpan> segments, const Model& model,
                         int64_t max_tokens) {
  SPLICE_RETURN_IF_ERROR(ValidatePrompt(tokens, model.config()));
  const auto length = static_cast<int64_t>(tokens.size());
  if (length > max_tokens)
    return InvalidArgument("the prompt has {} tokens; the prefill worker's KV pool holds {}", length, max_tokens);
  int32_t end = 0;
  for (const ReuseSpan& segment : segments) {
    if (segment.range.begin < end || segment.range.size() <= 0 || segment.range.end > length)
      return InvalidArgument("segment [{}, {}) behind position {} in a prompt of {} tokens", segment.range.begin,
                             segment.range.end, end, length);
    end = segment.range.end;
  }
  return absl::OkStatus();
}

absl::Status CheckPromptLogprobs(const PrefillRequest& request) {
  if (!request.prompt_logprobs.has_value()) return absl::OkStatus();
  const int32_t num_top = *request.prompt_logprobs;
  if (num_top < 0 || num_top > kernels::kMaxTopTokens)
    return InvalidArgument("prompt_logprobs is {}, not between 0 and {}", num_top, kernels::kMaxTopTokens);
  if (request.reuse.policy != methods::kExact)
    return InvalidArgument(
        "log-probabilities of prompts are those of exact prefill, and the reuse policy is '{}': choose 'exact'",
        request.reuse.policy);
  const int64_t count = static_cast<int64_t>(request.tokens.size()) * (1 + num_top);
  if (count > kMaxPromptLogprobs)
    return InvalidArgument("{} tokens with {} alternatives each are {} log-probabilities of the prompt, at most {}",
                           request.tokens.size(), num_top, count, kMaxPromptLogprobs);
  return absl::OkStatus();
}

PositionRanges RangesOf(std::span<const ReuseSpan> segments) {
  PositionRanges ranges;
  for (const ReuseSpan& segment : segments) ranges.push_back(segment.range);
  return ranges;
}

}  // namespace

PositionRanges PrefillJob::UnmarkedText(PositionRange within) const {
  return ComplementOf(RangesOf(request.segments), within);
}

void PrefillJob::Begin() {
  started = Clock::now();
  stats.submitted = submitted;
  stats.started = started;
  stats.queue_s = Seconds(started - submitted) - stats.lookup_s - stats.fetch_s;
}

absl::Status PrefillJob::StartRun(LocalKv& local, ParallelExecutor& executor) {
  const auto start = Clock::now();
  std::vector<SegmentHit> hits = local.FindSegments(*this);
  ReuseLayout layout = LayoutOf(request.tokens, cached(), hits);
  SPLICE_RETURN_IF_ERROR(ChooseMethodOf(*this, executor.model(), hits, layout));
  run = std::make_unique<PromptRun>(request.tokens, std::move(hits), std::move(layout), *kv, *policy);
  run->Report(stats);
  const int64_t most = request.max_computed_tokens;
  if (most > 0 && stats.computed_tokens > most)
    return Errorf(absl::StatusCode::kResourceExhausted,
                  "{} tokens of the prompt have no KV here, this worker computes at most {}", stats.computed_tokens,
                  most);
  SPLICE_RETURN_IF_ERROR(begin_fault.Hit().status);
  SPLICE_RETURN_IF_ERROR(AnnounceFinal(nullptr));
  SPLICE_RETURN_IF_ERROR(run->Begin(executor));
  SPLICE_RETURN_IF_ERROR(AnnounceFinal(&executor));
  run_lookup_s = Seconds(Clock::now() - start);
  stats.lookup_s += run_lookup_s;
  return absl::OkStatus();
}

size_t PrefillJob::num_stored_chunks() const {
  if (fetch == nullptr) return 0;
  const size_t found = fetch->report().found_chunks;
  return found == 0 ? 0 : fetch->first_chunk + found;
}

void PrefillJob::TakeFetched(Clock::time_point now) {
  const PromptFetch::Report report = fetch->report();
  if (report.begun != Clock::time_point{}) {
    stats.fetched = report.begun;
    stats.fetch_s = std::max(0.0, Seconds(now - report.begun));
  }
  if (fetch->overlaps && !fetch->over()) return;
  fetched = fetch->TakeSegments();
  const PositionRange landed = fetch->Close();
  if (landed.size() <= 0 || landed.begin != cached()) return;  // MeetFetch takes it at its place
  kv->set_num_tokens(landed.end);
  stats.stored_tokens += landed.size();
  stats.cached_tokens = cached();
  met = true;
}

int32_t PrefillJob::MeetFetch(int32_t room) {
  if (!run->may_skip()) {
    (void)fetch->Close();
    met = true;
    return room;
  }
  const int64_t from = run->next_position(), end = fetch->prefix.Take(from, room);
  if (end > from) {
    run->NoteWritten(fetch->prefix.Landed());
    (void)AnnounceFinal(nullptr);  // OK: no fence is made
    return static_cast<int32_t>(end - from);
  }
  const PositionRange landed = fetch->Close();
  met = true;
  run->Skip(landed);
  stats.stored_tokens += landed.size();
  stats.cached_tokens += landed.size();
  (void)AnnounceFinal(nullptr);  // OK: no fence is made
  return room;
}

void PrefillJob::EndFetch() {
  if (fetch == nullptr) return;
  (void)fetch->Close();
  const PromptFetch::Report report = fetch->report();
  stats.fetched_bytes = fetch->prefix.num_bytes() + report.segment_bytes;
  stats.store_s = report.seconds.value_or(Seconds(Clock::now() - report.begun));
  if (report.begun == Clock::time_point{}) stats.store_s = 0;
  const int64_t used = stats.stored_tokens + report.segment_tokens;
  stats.skipped_tokens = std::max<int64_t>(0, report.found_tokens - used);
  if (used > 0) {
    stats.store_use = stats.skipped_tokens > 0 ? StoreUse::kShared : StoreUse::kFetched;
  } else if (stats.skipped_tokens > 0) {
    stats.store_use = report.slower ? StoreUse::kSlower : StoreUse::kLate;
  }
}

PrefillSlice PrefillJob::NextSlice(int32_t room) {
  const PrefillSlice slice = run->Next(room, request.on_layer != nullptr);
  if (!slice.tokens.empty()) NoteKept();
  return slice;
}

// A policy that leaves tokens out knows them before the first of its pages is final, except those of the prefix.
void PrefillJob::NoteKept() {
  const std::span<const PositionRanges> layers = run->kept();
  if (layers.empty() || kept != nullptr) return;
  kept = std::make_shared<KeptTokens>(
      KeptTokens{static_cast<int32_t>(request.tokens.size()), {layers.begin(), layers.end()}});
}

absl::Status PrefillJob::FinishPass(ParallelExecutor& executor) {
  SPLICE_RETURN_IF_ERROR(run->Finish(executor));
  return AnnounceFinal(&executor);
}

absl::Status PrefillJob::AnnounceFinal(ParallelExecutor* executor) {
  if (!request.on_layer) return absl::OkStatus();
  NoteKept();
  std::shared_ptr<const kernels::Fence> fence;
  for (int32_t layer = 0; layer < kv->shape().num_layers; ++layer) {
    PageRanges pages = run->TakeFinalPages(layer, PromptRun::Final::kNow);
    if (pages.empty()) continue;
    if (executor != nullptr) {
      SPLICE_ASSIGN_OR_RETURN(fence, executor->RecordFenceOfAll());
      executor = nullptr;  // one for all layers
    }
    request.on_layer({kv, layer, std::move(pages), fence, kept, /*early=*/true});
  }
  return absl::OkStatus();
}

void PrefillJob::AnnounceLayer(int32_t layer, const std::shared_ptr<const kernels::Fence>& fence) {
  if (!request.on_layer) return;
  PageRanges pages = run->TakeFinalPages(layer, PromptRun::Final::kWithPass);
  if (!pages.empty()) request.on_layer({kv, layer, std::move(pages), fence, kept});
}

void PrefillJob::EndRun() {
  run->Report(stats);
  restored_heads = run->restored_heads();
  only = run->only();
  foreign_copies = run->foreign_copies();
}

PrefillOutcome PrefillJob::TakeOutcome(bool ok) {
  if (!ok) first_tokens.clear();
  return {std::move(first_tokens), kv,   stats, std::move(first_logits), std::move(prompt_logprobs),
          restored_heads,          kept, only};
}

absl::StatusOr<std::shared_ptr<PrefillJob>> MakeJob(PrefillRequest request, const Model& model, int64_t max_tokens,
                                                    const SegmentIndex& segments, bool has_store) {
  const ModelConfig& config = model.config();
  SPLICE_RETURN_IF_ERROR(CheckPrompt(request.tokens, request.segments, model, max_tokens));
  SPLICE_RETURN_IF_ERROR(ValidateSampling(request.sampling, config.vocab_size));
  const int64_t length = static_cast<int64_t>(request.tokens.size());
  if (request.num_output_tokens < 0 || request.num_output_tokens >= length)
    return InvalidArgument("num_output_tokens is {}, the prompt has {} tokens", request.num_output_tokens, length);
  SPLICE_RETURN_IF_ERROR(CheckSessionName(request.session));
  request.terms.choose |= methods::IsAuto(request.reuse.policy);
  const std::string best = DefaultReusePolicy(model.head_classes().get(), length);
  request.reuse.policy = methods::ResolvePolicy(request.reuse.policy, !request.segments.empty() || request.reuse_auto,
                                                methods::BestUnder(request.terms.quality, best));
  SPLICE_RETURN_IF_ERROR(CheckPromptLogprobs(request));
  auto job = std::make_shared<PrefillJob>();
  if (request.prompt_logprobs.has_value()) job->prompt_logprobs.resize(request.tokens.size() - 1);
  SPLICE_ASSIGN_OR_RETURN(
      job->policy, MakeRecoveryPolicy(request.reuse, config, model.head_classes().get(), model.recovery_profile()));
  if (request.segments.size() > static_cast<size_t>(job->policy->max_segments()))
    return InvalidArgument("segments has {} entries; reuse policy '{}' takes at most {}", request.segments.size(),
                           job->policy->name(), job->policy->max_segments());
  job->request = std::move(request);
  if (has_store && job->policy->reuses_segments()) {
    for (const ReuseSpan& segment : job->request.segments)
      job->segment_keys.push_back(segments.KeysOf(segment.namespace_key, job->text_of(segment.range)));
  }
  return job;
}

absl::StatusOr<std::shared_ptr<PrefillJob>> MakeJob(PublishRequest request, const Model& model, int64_t max_tokens) {
  if (request.segments.empty()) return InvalidArgument("segments is empty: nothing of the context would be stored");
  SPLICE_RETURN_IF_ERROR(CheckPrompt(request.tokens, request.segments, model, max_tokens));
  auto job = std::make_shared<PrefillJob>();
  job->policy = std::make_unique<ExactPolicy>(model.config(), RangesOf(request.segments));
  job->request.id = request.id;
  job->request.tokens = std::move(request.tokens);
  job->request.segments = request.segments;
  // A context has no namespace of its own; whoever may name its first segment's may share its start.
  job->request.namespace_key = request.segments[0].namespace_key;
  job->request.deadline = request.deadline;
  job->request.cancelled = request.cancelled;
  job->publish = std::move(request);
  return job;
}

}  // namespace spl::engine
