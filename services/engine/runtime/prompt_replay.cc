#include "services/engine/runtime/prompt_replay.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>

#include "kernels/selection/query_window.h"
#include "services/base/check.h"
#include "services/base/status.h"
#include "services/engine/recovery/exact.h"

namespace spl::engine {
namespace {

// What the rows [begin, begin + rows) pay to the positions [0, columns), added to `sums` [layer][kv head][width], from
// the layer `first` on.
absl::Status AddAttention(ParallelExecutor& executor, const PrefillSlice& rows, int32_t first, int32_t columns,
                          size_t width, std::vector<float>& sums) {
  const Model& model = executor.model();
  const ModelConfig& config = model.config();
  const int64_t heads_of_rank = config.num_kv_heads / model.num_ranks();
  SPLICE_ASSIGN_OR_RETURN(const ParallelExecutor::RankScores scores,
                          executor.AllocateScores(config.num_layers * heads_of_rank * columns));
  const PositionRange candidates{0, columns};
  std::vector<int32_t> probes(rows.tokens.size());
  std::iota(probes.begin(), probes.end(), 0);
  std::vector<ScoreTask> tasks;
  for (const auto& of_rank : scores)
    tasks.push_back({.kind = ScoreKind::kColumnMass,
                     .layer = first,
                     .every_head = true,
                     .probes = probes,
                     .candidates = {&candidates, 1},
                     .scores = static_cast<float*>(of_rank->data())});
  PrefillSlice slice = rows;
  slice.score = tasks.data();
  SPLICE_RETURN_IF_ERROR(
      executor.Prefill({&slice, 1}, {.layers = {0, config.num_layers}, .attention_only_last = true}));
  const size_t run = static_cast<size_t>(heads_of_rank * columns);
  std::vector<float> of_rank(run * static_cast<size_t>(config.num_layers));
  for (int r = 0; r < model.num_ranks(); ++r) {
    const kernels::CopyOp op{of_rank.data(), scores[static_cast<size_t>(r)]->data(), of_rank.size() * sizeof(float)};
    SPLICE_RETURN_IF_ERROR(model.rank(r).backend().Copy(kernels::CopyKind::kDownload, {&op, 1}));
    for (int32_t layer = 0; layer < config.num_layers; ++layer) {
      for (int64_t h = 0; h < heads_of_rank; ++h) {
        const int64_t stream = layer * config.num_kv_heads + model.rank(r).first_kv_head() + h;
        const float* from = of_rank.data() + static_cast<size_t>(layer) * run + h * columns;
        float* to = sums.data() + static_cast<size_t>(stream) * width;
        std::transform(from, from + columns, to, to, std::plus<>());
      }
    }
  }
  return absl::OkStatus();
}

// Sums of all streams [layer][kv head][columns], from the layer where choices begin; the others are zero.
absl::StatusOr<std::vector<float>> Attention(ParallelExecutor& executor, std::span<const int32_t> prompt,
                                             const SequenceKv& kv, const PromptSelector& selector) {
  const ModelConfig& config = executor.model().config();
  const auto length = static_cast<int32_t>(prompt.size()), columns = length - selector.window();
  const auto first_row = static_cast<int32_t>(selector.first_row(length));
  SPLICE_ASSIGN_OR_RETURN(const std::unique_ptr<SequenceKv> own, kv.Fork(first_row));
  SPLICE_ASSIGN_OR_RETURN(auto policy, MakeRecoveryPolicy({.policy = "exact"}, config));
  const auto width = static_cast<size_t>(columns);
  std::vector<float> sums(static_cast<size_t>(config.num_layers * config.num_kv_heads) * width);
  std::vector<int32_t> positions;
  for (int32_t begin = first_row; begin < length; begin += executor.max_rows()) {
    const int32_t end = std::min(begin + executor.max_rows(), length);
    positions.resize(static_cast<size_t>(end - begin));
    std::iota(positions.begin(), positions.end(), begin);
    const PrefillSlice rows{.tokens = prompt.subspan(static_cast<size_t>(begin), positions.size()),
                            .positions = positions,
                            .kv = own.get(),
                            .policy = policy.get()};
    SPLICE_RETURN_IF_ERROR(
        AddAttention(executor, rows, selector.scoring().first_layer, std::min(columns, end), width, sums));
  }
  return sums;
}

}  // namespace

absl::StatusOr<KeptPositions> ChooseOfPrompt(ParallelExecutor& executor, std::span<const int32_t> prompt,
                                             const SequenceKv& kv, const PromptSelector& selector) {
  const ModelConfig& config = executor.model().config();
  const auto length = static_cast<int64_t>(prompt.size());
  if (length == 0 || length > kv.num_tokens())
    return InvalidArgument(
        "decode selector '{}' runs the prompt's last tokens again and was given {} of the {} tokens that have KV",
        selector.name(), length, kv.num_tokens());
  if (!selector.chooses_of(length)) return KeptPositions();
  const int32_t first_layer = selector.scoring().first_layer;
  const auto columns = static_cast<int32_t>(length) - selector.window();
  SPLICE_ASSIGN_OR_RETURN(const std::vector<float> attention, Attention(executor, prompt, kv, selector));
  KeptPositions kept(static_cast<size_t>(config.num_layers * config.num_kv_heads));
  const size_t of_layer = static_cast<size_t>(config.num_kv_heads) * static_cast<size_t>(columns);
  for (int32_t layer = first_layer; layer < config.num_layers; ++layer) {
    if (!selector.Chooses(layer, 0)) continue;  // a layer with a window: all of its heads keep that
    auto lists = selector.Keep(std::span(attention).subspan(static_cast<size_t>(layer) * of_layer, of_layer), columns);
    for (int32_t h = 0; h < config.num_kv_heads; ++h) {
      std::vector<int32_t>& list = kept[static_cast<size_t>(layer * config.num_kv_heads + h)];
      list = std::move(lists[static_cast<size_t>(h)]);
      for (int64_t j = columns; j < kv.num_tokens(); ++j) list.push_back(static_cast<int32_t>(j));
    }
  }
  return kept;
}

absl::Status KeepPositions(const Model& model, PagePool& pool, const KeptPositions& kept, int64_t num_tokens,
                           PromptSelector& selector, const CompactPages& compact) {
  if (kept.empty()) return absl::OkStatus();
  SPLICE_RETURN_IF_ERROR(WriteKeptPositions(model, pool, kept, compact));
  size_t longest = 0;
  for (size_t stream = 0; stream < kept.size(); ++stream) {
    if (!compact.tables()[stream].empty()) longest = std::max(longest, kept[stream].size());
  }
  if (longest > 0) selector.SetKept(static_cast<int64_t>(longest) + 1, num_tokens);
  return absl::OkStatus();
}

}  // namespace spl::engine
