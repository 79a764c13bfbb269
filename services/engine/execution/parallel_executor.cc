#include "services/engine/execution/parallel_executor.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>

#include "services/base/status.h"

namespace spl::engine {
namespace {

constexpr int kSamplingThreadsMax = 16;

// Behind several fences.
class JointFence final : public kernels::Fence {
 public:
  explicit JointFence(std::vector<std::shared_ptr<const kernels::Fence>> fences) : fences_(std::move(fences)) {}
  absl::Status Wait() const override {
    for (const auto& fence : fences_) SPLICE_RETURN_IF_ERROR(fence->Wait());
    return absl::OkStatus();
  }
  std::span<const std::shared_ptr<const kernels::Fence>> joined() const override { return fences_; }

 private:
  const std::vector<std::shared_ptr<const kernels::Fence>> fences_;
};

std::shared_ptr<const kernels::Fence> JoinFences(const std::vector<std::shared_ptr<const kernels::Fence>>& of_ranks) {
  std::vector<std::shared_ptr<const kernels::Fence>> fences;
  for (const auto& fence : of_ranks) {
    if (fence != nullptr) fences.push_back(fence);
  }
  return fences.empty() ? nullptr : std::make_shared<JointFence>(std::move(fences));
}

}  // namespace

absl::StatusOr<std::unique_ptr<ParallelExecutor>> ParallelExecutor::Create(std::shared_ptr<const Model> model,
                                                                           const KvPartitions& pool,
                                                                           const ExecutorOptions& options) {
  const int num_ranks = model->num_ranks();
  if (pool.num_ranks() != num_ranks)
    return InvalidArgument("executor: a page pool for {} ranks, the model has {}", pool.num_ranks(), num_ranks);
  auto executor = std::unique_ptr<ParallelExecutor>(new ParallelExecutor(std::move(model), options));
  ExecutorOptions rank_options = options;
  std::vector<std::unique_ptr<kernels::Communicator>> communicators(num_ranks);
  if (num_ranks > 1) {
    SPLICE_ASSIGN_OR_RETURN(communicators, executor->model_->backend().NewGroup(executor->model_->backends()));
    for (const auto& communicator : communicators) executor->communicators_.push_back(communicator.get());
    // Ranks on one host share its cores.
    const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    rank_options.num_threads = std::max(1, (options.num_threads > 0 ? options.num_threads : cores) / num_ranks);
  }
  for (int r = 0; r < num_ranks; ++r) {
    SPLICE_ASSIGN_OR_RETURN(
        auto rank, Executor::Create(executor->model_, pool.rank(r), rank_options, r, std::move(communicators[r])));
    executor->ranks_.push_back(std::move(rank));
  }
  if (num_ranks == 1) return executor;
  executor->layers_ = std::vector<Layer>(executor->model_->config().num_layers);
  for (Layer& layer : executor->layers_) layer.fences.resize(num_ranks);
  executor->team_ = std::make_unique<RankTeam>(num_ranks, [self = executor.get()](const absl::Status& why) {
    for (kernels::Communicator* communicator : self->communicators_) communicator->Abort(why);
  });
  return executor;
}

absl::Status ParallelExecutor::CheckPass(size_t num_rows, size_t num_sequences) const {
  if (num_rows > static_cast<size_t>(options_.max_rows))
    return Errorf(absl::StatusCode::kResourceExhausted, "executor: {} rows in one pass, at most {}", num_rows,
                  options_.max_rows);
  if (num_sequences > static_cast<size_t>(options_.max_sequences))
    return Errorf(absl::StatusCode::kResourceExhausted, "executor: {} sequences in one pass, at most {}", num_sequences,
                  options_.max_sequences);
  return absl::OkStatus();
}

// A policy is asked by one thread and for one layer after the other, which the ranks do not keep to among themselves.
absl::Status ParallelExecutor::PlanPrefill(std::span<const PrefillSlice> slices) {
  const ModelConfig& c = model_->config();
  plans_.clear();
  ffn_plans_.clear();
  restore_above_.clear();
  line_tasks_.clear();
  for (const PrefillSlice& slice : slices) {
    for (int32_t layer = 0; layer < c.num_layers; ++layer) {
      const LayerPlan plan = slice.policy->PlanLayer(layer);
      ffn_plans_.push_back(plan.ffn);
      line_tasks_.push_back(plan.lines == nullptr ? std::nullopt : std::optional(*plan.lines));
      const std::vector<float> never(static_cast<size_t>(c.num_kv_heads), std::numeric_limits<float>::infinity());
      const std::span<const float> above =
          plan.restore_above.empty() ? std::span<const float>(never) : plan.restore_above;
      restore_above_.insert(restore_above_.end(), above.begin(), above.end());
      for (int32_t h = 0; h < c.num_kv_heads; ++h) {
        const kernels::HeadVisibility& head = plan.visibility[h];
        if (head.rule != kernels::VisibilityRule::kFull && head.rule != kernels::VisibilityRule::kBand &&
            head.rule != kernels::VisibilityRule::kList)
          return Errorf(absl::StatusCode::kUnimplemented, "tensor parallelism with policy '{}', which lists blocks",
                        slice.policy->name());
        plans_.push_back(head);
      }
    }
  }
  return absl::OkStatus();
}

// The last rank to reach a layer runs on_layer. Layers come in order: whoever is last at the next one is past this one.
bool ParallelExecutor::OnRankLayer(int rank, int32_t layer_idx, const OnLayer& on_layer) {
  std::shared_ptr<const kernels::Fence> fence = ranks_[rank]->RecordFence();
  {
    std::lock_guard lock(mutex_);
    if (stop_before_ && layer_idx >= *stop_before_) return false;
    furthest_ = std::max(furthest_, layer_idx);
    Layer& layer = layers_[layer_idx];
    layer.fences[rank] = std::move(fence);
    if (++layer.num_arrived < static_cast<int>(ranks_.size()) || stop_before_) return true;
    layer_fences_ = layer.fences;
  }
  const bool go_on = on_layer(layer_idx);
  layer_fences_.clear();
  if (go_on) return true;
  // Others may be layers ahead, where they wait for what this rank adds to their sums.
  std::lock_guard lock(mutex_);
  stop_before_ = furthest_ + 1;
  return true;
}

std::shared_ptr<const kernels::Fence> ParallelExecutor::RecordFence() {
  return team_ == nullptr ? ranks_[0]->RecordFence() : JoinFences(layer_fences_);
}

absl::StatusOr<std::shared_ptr<const kernels::Fence>> ParallelExecutor::RecordFenceOfAll() {
  if (team_ == nullptr) return ranks_[0]->RecordFence();
  std::vector<std::shared_ptr<const kernels::Fence>> fences(ranks_.size());
  SPLICE_RETURN_IF_ERROR(team_->Run([&](int r) {
    fences[r] = ranks_[r]->RecordFence();
    return absl::OkStatus();
  }));
  return JoinFences(fences);
}

absl::Status ParallelExecutor::Prefill(std::span<const PrefillSlice> slices, const PassLayers& pass,
                                       const OnLayer& on_layer, std::span<const DecodeRow> riders, Until until) {
  if (team_ == nullptr) return ranks_[0]->Prefill(slices, pass, on_layer, riders, until);
  size_t num_rows = riders.size();
  for (const PrefillSlice& slice : slices) num_rows += slice.tokens.size();
  SPLICE_RETURN_IF_ERROR(CheckPass(pass.whole ? 0 : num_rows, slices.size() + riders.size()));
  if (pass.whole && num_rows > static_cast<size_t>(options_.span_rows()))
    return Errorf(absl::StatusCode::kResourceExhausted, "executor: a span of {} rows, at most {}", num_rows,
                  options_.span_rows());
  SPLICE_RETURN_IF_ERROR(PlanPrefill(slices));
  const ModelConfig& c = model_->config();
  const auto plan = [&](size_t slice, int32_t layer) {
    const size_t at = slice * static_cast<size_t>(c.num_layers) + static_cast<size_t>(layer);
    const auto heads = static_cast<size_t>(c.num_kv_heads);
    return LayerPlan{.visibility = std::span<const kernels::HeadVisibility>(plans_).subspan(at * heads, heads),
                     .ffn = ffn_plans_[at],
                     .restore_above = std::span<const float>(restore_above_).subspan(at * heads, heads),
                     .lines = line_tasks_[at].has_value() ? &*line_tasks_[at] : nullptr};
  };
  std::vector<std::vector<PrefillSlice>> of_rank(ranks_.size(), {slices.begin(), slices.end()});
  for (size_t r = 0; r < of_rank.size(); ++r) {
    for (PrefillSlice& slice : of_rank[r]) {
      if (slice.hidden != nullptr) slice.hidden += r;
      if (slice.observers != nullptr) slice.observers += r;
      if (slice.lines != nullptr) slice.lines += r;
    }
  }
  furthest_ = -1;
  stop_before_.reset();
  for (Layer& layer : layers_) {
    layer.num_arrived = 0;
    std::fill(layer.fences.begin(), layer.fences.end(), nullptr);
  }
  SPLICE_RETURN_IF_ERROR(team_->Run([&](int r) {
    const OnLayer on_rank_layer = [&, r](int32_t layer) { return OnRankLayer(r, layer, on_layer); };
    const absl::Status status = ranks_[r]->Prefill(of_rank[r], pass, plan, on_layer ? on_rank_layer : nullptr, riders);
    return status.code() == absl::StatusCode::kCancelled ? absl::OkStatus() : status;  // all ranks alike
  }));
  return stop_before_ ? absl::CancelledError("the pass was cancelled") : absl::OkStatus();
}

absl::StatusOr<std::vector<HiddenStates>> ParallelExecutor::AllocateHidden(PositionRange positions) const {
  std::vector<HiddenStates> hidden;
  for (const auto& rank : ranks_) {
    SPLICE_ASSIGN_OR_RETURN(HiddenStates of_rank, rank->AllocateHidden(positions));
    hidden.push_back(std::move(of_rank));
  }
  return hidden;
}

absl::StatusOr<ParallelExecutor::RankScores> ParallelExecutor::TakeScores(int64_t count) {
  RankScores scores;
  for (const auto& rank : ranks_) {
    SPLICE_ASSIGN_OR_RETURN(auto of_rank, rank->TakeScores(count));
    scores.push_back(std::move(of_rank));
  }
  return scores;
}

absl::StatusOr<std::vector<float>> ParallelExecutor::ReadScores(const RankScores& scores, int64_t num_scores) {
  const auto count = static_cast<size_t>(num_scores);
  std::vector<std::vector<float>> parts(ranks_.size(), std::vector<float>(count));
  for (size_t r = 0; r < parts.size(); ++r) {
    SPLICE_RETURN_IF_ERROR(ranks_[r]->context().session->Synchronize());
    SPLICE_RETURN_IF_ERROR(
        model_->rank(static_cast<int>(r))
            .backend()
            .Copy(kernels::CopyKind::kDownload, parts[r].data(), scores[r]->data(), count * sizeof(float)));
  }
  for (size_t r = 1; r < parts.size(); ++r) {
    for (size_t i = 0; i < count; ++i) parts[0][i] += parts[r][i];
  }
  return std::move(parts[0]);
}

absl::StatusOr<std::vector<int32_t>> ParallelExecutor::SelectTop(const RankScores& scores, int64_t num_scores,
                                                                 int32_t pool_radius, int64_t k) {
  if (team_ == nullptr) return ranks_[0]->SelectTop(*scores[0], num_scores, pool_radius, k);
  const auto count = static_cast<size_t>(num_scores);
  std::vector<std::vector<float>> parts(ranks_.size(), std::vector<float>(count));
  SPLICE_RETURN_IF_ERROR(team_->Run([&](int r) {
    return model_->rank(r).backend().Copy(kernels::CopyKind::kDownload, parts[r].data(), scores[r]->data(),
                                          count * sizeof(float));
  }));
  for (size_t r = 1; r < parts.size(); ++r) {
    for (size_t i = 0; i < count; ++i) parts[0][i] += parts[r][i];
  }
  std::vector<int32_t> best;
  SPLICE_RETURN_IF_ERROR(team_->Run([&](int r) -> absl::Status {
    if (r != 0) return absl::OkStatus();
    SPLICE_RETURN_IF_ERROR(model_->rank(0).backend().Copy(kernels::CopyKind::kUpload, scores[0]->data(),
                                                          parts[0].data(), count * sizeof(float)));
    SPLICE_ASSIGN_OR_RETURN(best, ranks_[0]->SelectTop(*scores[0], num_scores, pool_radius, k));
    return absl::OkStatus();
  }));
  return best;
}

absl::Status ParallelExecutor::AlignCopy(std::span<const AlignPlan> plans) {
  if (team_ == nullptr) return ranks_[0]->AlignCopy(plans[0]);
  return team_->Run([&](int r) { return ranks_[r]->AlignCopy(plans[r]); });
}

absl::Status ParallelExecutor::Decode(std::span<const DecodeRow> rows) {
  for (const DecodeRow& row : rows) row.selector->BeginStep(row.kv_len());
  if (team_ == nullptr) return ranks_[0]->Decode(rows);
  SPLICE_RETURN_IF_ERROR(CheckPass(rows.size(), rows.size()));
  return team_->Run([&](int r) { return ranks_[r]->Decode(rows); });
}

absl::StatusOr<PendingMass> ParallelExecutor::BeginMass() {
  if (team_ == nullptr) return ranks_[0]->BeginMass();
  const auto layers = static_cast<size_t>(model_->config().num_layers),
             heads = static_cast<size_t>(model_->config().num_kv_heads);
  std::vector<KeptMass> parts(ranks_.size());
  std::vector<PendingMass> pending(ranks_.size());
  SPLICE_RETURN_IF_ERROR(team_->Run([&](int r) -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(pending[r], ranks_[r]->BeginMass());
    SPLICE_ASSIGN_OR_RETURN(parts[r], pending[r].Wait());
    return absl::OkStatus();
  }));
  const size_t rows = parts[0].num_rows;
  std::vector<float> all(parts[0].values.empty() ? 0 : layers * rows * heads);
  for (size_t r = 0; r < parts.size() && !all.empty(); ++r) {
    const size_t own = parts[r].num_kv_heads,
                 first = static_cast<size_t>(model_->rank(static_cast<int>(r)).first_kv_head());
    for (size_t i = 0; i < layers * rows; ++i)
      std::copy_n(parts[r].values.begin() + static_cast<std::ptrdiff_t>(i * own), own,
                  all.begin() + static_cast<std::ptrdiff_t>(i * heads + first));
  }
  return PendingMass(std::move(all), rows, heads);
}

absl::Status ParallelExecutor::ComputeLogits(std::span<const int32_t> rows) {
  if (team_ == nullptr) return ranks_[0]->ComputeLogits(rows);
  SPLICE_RETURN_IF_ERROR(CheckPass(rows.size(), 0));
  return team_->Run([&](int r) { return ranks_[r]->ComputeLogits(rows); });
}

absl::StatusOr<std::span<float>> ParallelExecutor::Logits() {
  if (team_ == nullptr) return ranks_[0]->Logits();
  const size_t vocab = model_->config().vocab_size;
  const size_t rows = ranks_[0]->num_logit_rows();
  logits_.resize(rows * vocab);
  SPLICE_RETURN_IF_ERROR(team_->Run([&](int r) -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(const std::span<float> part, ranks_[r]->Logits());
    const Range ids = model_->rank(r).vocab();
    const size_t width = ids.size();
    for (size_t row = 0; row < rows; ++row)
      std::copy_n(part.begin() + row * width, width, logits_.begin() + row * vocab + ids.begin);
    return absl::OkStatus();
  }));
  return std::span<float>(logits_);
}

absl::StatusOr<std::span<const int32_t>> ParallelExecutor::Argmax() {
  if (team_ == nullptr) return ranks_[0]->Argmax();
  std::vector<Executor::Best> best(ranks_.size());
  SPLICE_RETURN_IF_ERROR(team_->Run([&](int r) -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(best[r], ranks_[r]->ArgmaxWithLogits());
    return absl::OkStatus();
  }));
  // Ties to the lower id, which is the lower rank's; a rank that only has NaN says NaN.
  argmax_.assign(best[0].tokens.begin(), best[0].tokens.end());
  for (size_t row = 0; row < argmax_.size(); ++row) {
    float highest = best[0].logits[row];
    for (size_t r = 1; r < best.size(); ++r) {
      const float logit = best[r].logits[row];
      if (!(logit > highest) && !(std::isnan(highest) && !std::isnan(logit))) continue;
      highest = logit;
      argmax_[row] = static_cast<int32_t>(model_->rank(static_cast<int>(r)).vocab().begin) + best[r].tokens[row];
    }
  }
  return std::span<const int32_t>(argmax_);
}

absl::Status ParallelExecutor::Synchronize() {
  absl::Status status;
  for (const auto& rank : ranks_) status.Update(rank->context().session->Synchronize());
  return status;
}

absl::StatusOr<SampledBatch> ParallelExecutor::Sample(std::span<const kernels::SampleRow> rows) {
  if (team_ == nullptr) return ranks_[0]->Sample(rows);
  SPLICE_ASSIGN_OR_RETURN(const std::span<const float> logits, Logits());
  int32_t stride = 0;
  for (const kernels::SampleRow& row : rows) stride = std::max(stride, row.num_top);
  sampled_.resize(rows.size());
  top_.resize(rows.size() * static_cast<size_t>(stride));
  kernels::KernelContext threads = context();
  if (threads.pool == nullptr && rows.size() > 1) {
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    if (sampling_threads_ == nullptr)
      sampling_threads_ = std::make_unique<kernels::ThreadPool>(std::clamp(cores, 1, kSamplingThreadsMax));
    threads.pool = sampling_threads_.get();
    threads.isa = kernels::DetectCpuIsa();
  }
  SPLICE_RETURN_IF_ERROR(kernels::cpu::SampleTokens(threads, {.logits = logits.data(),
                                                              .num_logit_rows = ranks_[0]->num_logit_rows(),
                                                              .width = model_->config().vocab_size,
                                                              .rows = rows,
                                                              .out = sampled_.data(),
                                                              .top = top_.data(),
                                                              .top_stride = stride}));
  return SampledBatch{sampled_, top_, stride};
}

}  // namespace spl::engine
