#include "services/engine/runtime/canonical_prefill.h"

#include <chrono>
#include <utility>
#include <vector>

#include "services/engine/runtime/local_generator.h"

namespace spl::engine {

CanonicalPrefill::CanonicalPrefill(std::shared_ptr<const Model> model, PagePool& pool, SegmentIndex& segments,
                                   CanonicalPrefillOptions options)
    : model_(std::move(model)),
      pool_(pool),
      segments_(segments),
      options_(std::move(options)),
      cost_(model_->config()),
      queue_(options_.max_queued) {}

CanonicalStats CanonicalPrefill::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

void CanonicalPrefill::Count(const std::function<void(CanonicalStats&)>& change) {
  std::lock_guard lock(mutex_);
  change(stats_);
  stats_.running = run_.has_value();
  stats_.num_queued = queue_.size() + (run_.has_value() ? 1 : 0);
}

void CanonicalPrefill::Add(CanonicalTask task) {
  const size_t num_dropped = queue_.Add(std::move(task));
  Count([&](CanonicalStats& stats) { stats.num_dropped += num_dropped; });
}

absl::StatusOr<CanonicalPrefill::Pass> CanonicalPrefill::Step(ParallelExecutor& executor,
                                                              const std::function<bool()>& stop) {
  if (!run_.has_value() && !Start(executor)) return Pass{};
  const auto start = std::chrono::steady_clock::now();
  PromptRun& run = *run_->prompt;
  const PrefillSlice slice = run.Next(executor.max_rows());
  const PassLayers layers = run.layers();
  absl::Status status = executor.Prefill({&slice, 1}, layers, [&](int32_t) { return !stop(); });
  if (status.code() == absl::StatusCode::kCancelled) {
    Cancel();
    return Pass{};
  }
  Pass pass{run.pass_work(), cost_.Of(slice.positions, layers.layers.begin, layers.layers.end)};
  if (status.ok()) status = run.Finish(executor);
  pass.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!status.ok()) {
    run_.reset();
    Count([](CanonicalStats& stats) { ++stats.num_dropped; });
    return status;
  }
  if (run.done()) Finish();
  return pass;
}

// The next segment that still has no source. False when there is none, or there are no pages for it.
bool CanonicalPrefill::Start(ParallelExecutor& executor) {
  while (std::optional<CanonicalTask> task = queue_.Take()) {
    const bool known = task->replaces ? segments_.ContainsFirst(task->keys) : segments_.Contains(task->keys);
    const bool begun = !known && Begin(*std::move(task), executor);
    Count([&](CanonicalStats& stats) { stats.num_dropped += known || begun ? 0 : 1; });
    if (begun) return true;
  }
  return false;
}

bool CanonicalPrefill::Begin(CanonicalTask task, ParallelExecutor& executor) {
  const auto begin = static_cast<int32_t>(task.lead.size());
  const auto length = begin + static_cast<int32_t>(task.tokens.size());
  auto kv = std::make_shared<SequenceKv>(pool_, KvShapeOf(model_->config()));
  if (!options_.make_room(PagesForTokens(model_->config(), length)) || !kv->Reserve(length).ok()) return false;
  Run& run = run_.emplace();
  run.task = std::move(task);
  run.kv = std::move(kv);
  run.prompt_tokens = run.task.lead;
  run.prompt_tokens.insert(run.prompt_tokens.end(), run.task.tokens.begin(), run.task.tokens.end());
  run.policy = std::make_unique<ExactPolicy>(model_->config(), PositionRanges{{begin, length}});
  run.prompt = std::make_unique<PromptRun>(run.prompt_tokens, std::vector<SegmentHit>(), *run.kv, *run.policy);
  if (run.prompt->Begin(executor).ok()) return true;
  run_.reset();
  return false;
}

void CanonicalPrefill::Finish() {
  const CanonicalTask& task = run_->task;
  const size_t num_tokens = task.tokens.size();
  const auto begin = static_cast<int32_t>(task.lead.size()), end = static_cast<int32_t>(run_->prompt_tokens.size());
  auto source = std::make_shared<SegmentSource>(*run_->kv, begin, task.tokens,
                                                SourceContextOf(task.namespace_key, run_->prompt_tokens, begin, begin));
  source->KeepSummary(run_->policy->LocalSummaryOf({begin, end}));
  if (task.replaces) segments_.Replace(task.namespace_key, source, task.frozen);
  if (task.replaces || segments_.Insert(task.namespace_key, source, task.frozen)) options_.on_computed(task, source);
  run_.reset();
  Count([&](CanonicalStats& stats) {
    ++stats.num_computed;
    stats.num_tokens += num_tokens;
  });
}

void CanonicalPrefill::Cancel() {
  if (!run_.has_value()) return;
  CanonicalTask task = std::move(run_->task);
  run_.reset();
  const size_t num_dropped = queue_.Add(std::move(task));
  Count([&](CanonicalStats& stats) {
    ++stats.num_cancelled;
    stats.num_dropped += num_dropped;
  });
}

void CanonicalPrefill::DropQueued() {
  if (const size_t count = queue_.Clear(); count > 0) Count([&](CanonicalStats& stats) { stats.num_dropped += count; });
}

}  // namespace spl::engine
