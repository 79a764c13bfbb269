#include "services/engine/profile/head_profiler.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "services/base/check.h"
#include "services/base/status.h"
#include "services/engine/cache/page_pool.h"
#include "services/engine/cache/sequence_kv.h"
#include "services/engine/methods/recovery_methods.h"
#include "services/engine/recovery/recovery_policy.h"
#include "services/engine/runtime/local_generator.h"

namespace spl::engine {
namespace {

constexpr int32_t kProbeRows = 64;  // rows of a probe of restoring (docs/methods/redknot.md, "Restore")

// [layer][query head] → [layer][kv_head]: the largest value of each group.
std::vector<float> LargestOfGroups(const std::vector<float>& of_query_heads, const ModelConfig& config) {
  const int32_t group = config.num_qo_heads / config.num_kv_heads;
  std::vector<float> largest;
  for (size_t i = 0; i < of_query_heads.size(); i += static_cast<size_t>(group))
    largest.push_back(*std::max_element(of_query_heads.begin() + static_cast<int64_t>(i),
                                        of_query_heads.begin() + static_cast<int64_t>(i) + group));
  return largest;
}

float Percentile(std::vector<float> values, double share) {
  if (values.empty()) return 0;
  const auto rank = static_cast<size_t>(std::ceil(share * static_cast<double>(values.size()))) - 1;
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(rank), values.end());
  return values[rank];
}

}  // namespace

absl::StatusOr<std::unique_ptr<HeadProfiler>> HeadProfiler::Create(std::shared_ptr<const Model> model,
                                                                   const HeadProfilerOptions& options) {
  if (model->num_ranks() > 1)
    return Errorf(absl::StatusCode::kUnimplemented, "head classes are profiled on one rank, not on {}",
                  model->num_ranks());
  auto profiler = std::unique_ptr<HeadProfiler>(new HeadProfiler);
  profiler->model_ = std::move(model);
  profiler->options_ = options;
  profiler->options_.executor.max_rows = options.max_text_tokens;  // a text is one pass
  const Model& m = *profiler->model_;
  SPLICE_ASSIGN_OR_RETURN(KvMemory memory, AllocateKvMemory(m, PagesForTokens(m.config(), options.max_text_tokens)));
  profiler->memory_ = std::make_unique<KvMemory>(std::move(memory));
  profiler->pool_ = std::make_unique<PagePool>(profiler->memory_->pages, m.backends());
  SPLICE_ASSIGN_OR_RETURN(profiler->executor_, Executor::Create(profiler->model_, profiler->memory_->pages.rank(0),
                                                                profiler->options_.executor));
  const auto heads = static_cast<size_t>(m.config().num_layers) * static_cast<size_t>(m.config().num_qo_heads);
  profiler->edge_sum_.resize(heads);
  profiler->shift_sum_.resize(heads);
  profiler->edge_of_rows_.resize(heads);
  profiler->edge_of_answers_.resize(heads);
  return profiler;
}

absl::Status HeadProfiler::Run(std::span<const int32_t> tokens, bool measure_edge, int32_t num_answer_tokens,
                               const std::function<void(int32_t, std::span<const float>)>& on_chunk) {
  const ModelConfig& config = model_->config();
  SPLICE_RETURN_IF_ERROR(ValidatePrompt(tokens, config));
  SPLICE_ASSIGN_OR_RETURN(const auto policy, MakeRecoveryPolicy({.policy = "exact"}, config));
  SequenceKv kv(*pool_, KvShapeOf(config));
  SPLICE_RETURN_IF_ERROR(kv.Reserve(static_cast<int64_t>(tokens.size())));
  std::vector<int32_t> positions(tokens.size());
  std::iota(positions.begin(), positions.end(), 0);
  const size_t chunk = static_cast<size_t>(options_.chunk_tokens) * static_cast<size_t>(config.q_size());
  AttentionProfile profile(
      {.rule = kernels::VisibilityRule::kBand, .num_sinks = options_.sinks, .window = options_.window},
      [&](const AttentionObservation& seen) {
        if (measure_edge) AddEdge(seen, num_answer_tokens);
        on_chunk(seen.layer, seen.out.last(chunk));
      });
  const ObserverList observers = {&profile};
  const PrefillSlice slice{
      .tokens = tokens, .positions = positions, .kv = &kv, .policy = policy.get(), .observers = &observers};
  return executor_->Prefill({&slice, 1}, PassLayers{{0, config.num_layers}});
}

void HeadProfiler::AddEdge(const AttentionObservation& seen, int32_t num_answer_tokens) {
  const auto heads = static_cast<size_t>(model_->config().num_qo_heads);
  const size_t rows = seen.lse.size() / heads;
  for (size_t h = 0; h < heads; ++h) {
    const size_t at = static_cast<size_t>(seen.layer) * heads + h;
    double block = 0, answer = 0;
    const size_t first_answer = rows - 1 - static_cast<size_t>(num_answer_tokens);  // its row chooses the first token
    for (size_t row = 0; row < rows; ++row) {
      const double inside = std::exp(double{seen.lse_other[row * heads + h]} - double{seen.lse[row * heads + h]});
      const double edge = std::clamp(1 - inside, 0.0, 1.0);
      edge_sum_[at] += edge;
      block += edge;
      if (row >= first_answer && row + 1 < rows) answer += edge;
      if ((row + 1) % kProbeRows != 0) continue;
      edge_of_rows_[at].push_back(static_cast<float>(block / kProbeRows));
      block = 0;
    }
    if (num_answer_tokens > 0) edge_of_answers_[at].push_back(static_cast<float>(answer / num_answer_tokens));
  }
}

void HeadProfiler::AddShift(int32_t layer, std::span<const float> alone, std::span<const float> prefixed) {
  const ModelConfig& config = model_->config();
  const auto heads = static_cast<size_t>(config.num_qo_heads), dim = static_cast<size_t>(config.head_dim);
  for (size_t at = 0; at < alone.size(); at += dim) {
    double ab = 0, aa = 0, bb = 0;
    for (size_t c = at; c < at + dim; ++c) {
      ab += double{alone[c]} * prefixed[c];
      aa += double{alone[c]} * alone[c];
      bb += double{prefixed[c]} * prefixed[c];
    }
    const double cosine = aa > 0 && bb > 0 ? ab / std::sqrt(aa * bb) : 1;
    shift_sum_[static_cast<size_t>(layer) * heads + at / dim % heads] += std::clamp(1 - cosine, 0.0, 1.0);
  }
}

absl::Status HeadProfiler::Add(std::span<const int32_t> text, std::span<const int32_t> other,
                               int32_t num_answer_tokens) {
  if (num_answer_tokens < 0 || num_answer_tokens >= options_.chunk_tokens)
    return InvalidArgument("an answer of {} tokens at the end of a calibration text; fewer than {} are possible",
                           num_answer_tokens, options_.chunk_tokens);
  for (const auto& tokens : {text, other}) {
    if (static_cast<int64_t>(tokens.size()) < 2 * options_.chunk_tokens ||
        static_cast<int64_t>(tokens.size()) > options_.max_text_tokens)
      return InvalidArgument("a calibration text has {} tokens; {} to {} are needed", tokens.size(),
                             2 * options_.chunk_tokens, options_.max_text_tokens);
  }
  const auto chunk = text.last(options_.chunk_tokens);
  ChunkOutputs alone(static_cast<size_t>(model_->config().num_layers));
  SPLICE_RETURN_IF_ERROR(Run(chunk, false, 0, [&](int32_t layer, std::span<const float> outputs) {
    alone[layer].assign(outputs.begin(), outputs.end());
  }));
  const auto compare = [&](int32_t layer, std::span<const float> outputs) { AddShift(layer, alone[layer], outputs); };
  SPLICE_RETURN_IF_ERROR(Run(text, true, num_answer_tokens, compare));
  std::vector<int32_t> elsewhere(other.begin(), other.end() - options_.chunk_tokens);
  elsewhere.insert(elsewhere.end(), chunk.begin(), chunk.end());
  SPLICE_RETURN_IF_ERROR(Run(elsewhere, false, 0, compare));
  ++num_texts_;
  num_rows_ += static_cast<int64_t>(text.size());
  num_shift_rows_ += 2 * int64_t{options_.chunk_tokens};
  return absl::OkStatus();
}

HeadProfile HeadProfiler::Result() const {
  SPLICE_CHECK(num_texts_ > 0, "texts were measured");
  std::vector<float> edge, q99, shift, answers;
  for (size_t i = 0; i < edge_sum_.size(); ++i) {
    edge.push_back(static_cast<float>(edge_sum_[i] / static_cast<double>(num_rows_)));
    q99.push_back(Percentile(edge_of_rows_[i], 0.99));
    if (!edge_of_answers_[i].empty()) answers.push_back(Percentile(edge_of_answers_[i], 0.95));
    shift.push_back(static_cast<float>(shift_sum_[i] / static_cast<double>(num_shift_rows_)));
  }
  const ModelConfig& config = model_->config();
  return {.num_tokens = num_rows_,
          .edge_mass = LargestOfGroups(edge, config),
          .edge_mass_q99 = LargestOfGroups(q99, config),
          .prefix_shift = LargestOfGroups(shift, config),
          .answer_mass = LargestOfGroups(answers, config)};
}

}  // namespace spl::engine
