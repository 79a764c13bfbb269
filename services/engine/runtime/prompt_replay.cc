#include "services/engine/runtime/prompt_replay.h"

#include <algorithm>
#include <memory>
#include <numeric>

#include "kernels/selection/query_window.h"
#include "services/base/check.h"
#include "services/base/status.h"
#include "services/engine/recovery/exact.h"

namespace spl::engine {
namespace {

// Sums of all streams [layer][kv head][columns], from the layer `first` on; the others are zero.
absl::StatusOr<std::vector<float>> Attention(ParallelExecutor& executor, std::span<const int32_t> prompt,
                                             const SequenceKv& kv, int32_t window, int32_t first) {
  const Model& model = executor.model();
  const ModelConfig& config = model.config();
  const auto columns = static_cast<int32_t>(prompt.size()) - window;
  SPLICE_ASSIGN_OR_RETURN(const std::unique_ptr<SequenceKv> own, kv.Fork(columns));
  SPLICE_ASSIGN_OR_RETURN(auto policy, MakeRecoveryPolicy({.policy = "exact"}, config));
  const int64_t heads_of_rank = config.num_kv_heads / model.num_ranks();
  SPLICE_ASSIGN_OR_RETURN(const ParallelExecutor::RankScores scores,
                          executor.AllocateScores(config.num_layers * heads_of_rank * columns));
  const PositionRange candidates{0, columns};
  std::vector<int32_t> positions, probes;
  for (int32_t begin = columns; begin < columns + window; begin += executor.max_rows()) {
    const int32_t rows = std::min(executor.max_rows(), columns + window - begin);
    positions.resize(static_cast<size_t>(rows));
    probes.resize(positions.size());
    std::iota(positions.begin(), positions.end(), begin);
    std::iota(probes.begin(), probes.end(), 0);
    std::vector<ScoreTask> tasks;
    for (const auto& of_rank : scores)
      tasks.push_back({.kind = ScoreKind::kColumnMass,
                       .layer = first,
                       .every_head = true,
                       .probes = probes,
                       .candidates = {&candidates, 1},
                       .scores = static_cast<float*>(of_rank->data())});
    const PrefillSlice slice{.tokens = prompt.subspan(static_cast<size_t>(begin), positions.size()),
                             .positions = positions,
                             .kv = own.get(),
                             .policy = policy.get(),
                             .score = tasks.data()};
    SPLICE_RETURN_IF_ERROR(
        executor.Prefill({&slice, 1}, {.layers = {0, config.num_layers}, .attention_only_last = true}));
  }
  const auto width = static_cast<size_t>(columns);
  std::vector<float> all(static_cast<size_t>(config.num_layers * config.num_kv_heads) * width);
  for (int r = 0; r < model.num_ranks(); ++r) {
    std::vector<kernels::CopyOp> ops;
    const auto* from = static_cast<const float*>(scores[static_cast<size_t>(r)]->data());
    const size_t run = static_cast<size_t>(heads_of_rank) * width;
    for (int32_t layer = 0; layer < config.num_layers; ++layer) {
      const auto stream = static_cast<size_t>(layer * config.num_kv_heads + model.rank(r).first_kv_head());
      ops.push_back({&all[stream * width], from + static_cast<size_t>(layer) * run, run * sizeof(float)});
    }
    SPLICE_RETURN_IF_ERROR(model.rank(r).backend().Copy(kernels::CopyKind::kDownload, ops));
  }
  return all;
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
  SPLICE_ASSIGN_OR_RETURN(const std::vector<float> attention,
                          Attention(executor, prompt, kv, selector.window(), first_layer));
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
  const size_t page_entries = model.page_bytes() / sizeof(int32_t);
  std::vector<std::vector<int32_t>> entries(kept.size());  // their number, then the positions
  std::vector<std::vector<kernels::CopyOp>> ops(static_cast<size_t>(model.num_ranks()));
  size_t longest = 0;
  for (size_t stream = 0; stream < kept.size(); ++stream) {
    const std::vector<int32_t>& pages = compact.tables()[stream];
    if (pages.empty()) continue;
    longest = std::max(longest, kept[stream].size());
    std::vector<int32_t>& of_stream = entries[stream];
    of_stream.push_back(static_cast<int32_t>(kept[stream].size()));
    of_stream.insert(of_stream.end(), kept[stream].begin(), kept[stream].end());
    SPLICE_CHECK(of_stream.size() < pages.size() * page_entries, "room for the list and the next position");
    for (size_t at = 0, page = 0; at < of_stream.size(); at += page_entries, ++page) {
      const size_t count = std::min(page_entries, of_stream.size() - at);
      ops[static_cast<size_t>(pool.view().rank_of(pages[page]))].push_back(
          {pool.view().k(pages[page]), &of_stream[at], count * sizeof(int32_t)});
    }
  }
  for (int r = 0; r < model.num_ranks(); ++r)
    SPLICE_RETURN_IF_ERROR(model.rank(r).backend().Copy(kernels::CopyKind::kUpload, ops[static_cast<size_t>(r)]));
  if (longest > 0) selector.SetKept(static_cast<int64_t>(longest) + 1, num_tokens);
  return absl::OkStatus();
}

}  // namespace spl::engine
