#include "services/engine/runtime/prompt_replay.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>

#include "services/base/check.h"
#include "services/base/status.h"
#include "services/engine/execution/observers/column_scoring.h"
#include "services/engine/methods/recovery_methods.h"
#include "services/engine/recovery/exact.h"

namespace spl::engine {
namespace {

// What the rows pay to the positions `columns`, the first of `width`, added to `sums` [layer][kv head][width], in these
// layers; the pass ends with them.
absl::Status AddAttention(ParallelExecutor& executor, const PrefillSlice& rows, LayerRange layers,
                          const PositionRanges& candidates, size_t width, std::vector<float>& sums) {
  const Model& model = executor.model();
  const ModelConfig& config = model.config();
  const int64_t heads_of_rank = config.num_kv_heads / model.num_ranks(), columns = CountOf(candidates);
  SPLICE_ASSIGN_OR_RETURN(const ParallelExecutor::RankScores scores,
                          executor.TakeScores(layers.end * heads_of_rank * columns));
  std::vector<ColumnScoring> scorings;
  std::vector<ObserverList> observers;
  scorings.reserve(scores.size());  // observers point into it
  for (const auto& of_rank : scores) {
    const PositionRange all_rows{rows.positions.front(), rows.positions.back() + 1};
    scorings.emplace_back(ColumnScoringOptions{.layer = layers.begin,
                                               .probes = {all_rows},
                                               .candidates = candidates,
                                               .every_head = true,
                                               .scores = static_cast<float*>(of_rank->data())});
    observers.push_back({&scorings.back()});
  }
  PrefillSlice slice = rows;
  slice.observers = observers.data();
  SPLICE_RETURN_IF_ERROR(executor.Prefill({&slice, 1}, {.layers = {0, layers.end}, .attention_only_last = true}));
  const size_t run = heads_of_rank * columns;
  std::vector<float> of_rank(run * static_cast<size_t>(layers.end));
  for (int r = 0; r < model.num_ranks(); ++r) {
    const kernels::CopyOp op{of_rank.data(), scores[r]->data(), of_rank.size() * sizeof(float)};
    SPLICE_RETURN_IF_ERROR(model.rank(r).backend().Copy(kernels::CopyKind::kDownload, {&op, 1}));
    for (int32_t layer = layers.begin; layer < layers.end; ++layer) {
      for (int64_t h = 0; h < heads_of_rank; ++h) {
        const int64_t stream = layer * config.num_kv_heads + model.rank(r).first_kv_head() + h;
        const float* from = of_rank.data() + static_cast<size_t>(layer) * run + static_cast<size_t>(h * columns);
        float* to = sums.data() + static_cast<size_t>(stream) * width;
        std::transform(from, from + columns, to, to, std::plus<>());
      }
    }
  }
  return absl::OkStatus();
}

// What rows of a prompt see that was left out in part: what their layer keeps. Its lists outlive it.
class KeptRowsPolicy final : public RecoveryPolicy {
 public:
  KeptRowsPolicy(const ModelConfig& config, std::span<const std::vector<int32_t>> lists)
      : RecoveryPolicy(config), lists_(lists), visibility_(config.num_kv_heads) {}
  std::string_view name() const override { return "kept_rows"; }
  bool reuses_segments() const override { return false; }
  LayerPlan PlanLayer(int32_t layer) override {
    std::fill(visibility_.begin(), visibility_.end(),
              kernels::HeadVisibility{.rule = kernels::VisibilityRule::kList, .indices = lists_[layer]});
    return {.visibility = visibility_};
  }

 private:
  const std::span<const std::vector<int32_t>> lists_;  // [num_layers]
  std::vector<kernels::HeadVisibility> visibility_;
};

// A prompt as a selector sees it: of each layer the positions that are there, and the rows that are run again.
struct Replay {
  std::vector<PositionRanges> layers;  // [num_layers]; positions of the prompt
  std::vector<int32_t> rows;           // kept by all layers, ascending
  int32_t tail = 0;                    // the positions from here on are kept, of those that are there

  // `end`: positions that have KV, the prompt's `length` and generated ones.
  Replay(const ModelConfig& config, const KeptTokens* kept, int32_t length, int32_t end,
         const PromptSelector& selector) {
    const PositionRange prompt{0, length}, all{0, selector.accumulates() ? end : length};
    layers.assign(static_cast<size_t>(config.num_layers), {all});
    PositionRanges common = {prompt};
    for (size_t i = 0; i < layers.size() && kept != nullptr; ++i) {
      layers[i] = IntersectionOf(kept->layers[i], {&all, 1});
      common = IntersectionOf(common, layers[i]);
    }
    for (const PositionRange& range : common) {
      for (int32_t p = range.begin; p < range.end; ++p) rows.push_back(p);
    }
    const auto count = static_cast<int64_t>(rows.size());
    tail = all.end;
    if (!selector.accumulates() && !rows.empty()) tail = rows[std::max<int64_t>(count - selector.window(), 0)];
    rows.erase(rows.begin(), rows.begin() + std::max<int64_t>(selector.first_row(count), 0));
  }
  // What of a layer is chosen from.
  PositionRanges Columns(int32_t layer) const {
    const PositionRange front{0, tail};
    return IntersectionOf(layers[layer], {&front, 1});
  }
};

std::vector<int32_t> PositionsOf(const PositionRanges& ranges) {
  std::vector<int32_t> positions;
  for (const PositionRange& range : ranges) {
    for (int32_t p = range.begin; p < range.end; ++p) positions.push_back(p);
  }
  return positions;
}

}  // namespace

struct PromptChoice::State {
  State(ParallelExecutor& executor, std::span<const int32_t> prompt, const SequenceKv& kv,
        const PromptSelector& selector)
      : executor(executor),
        prompt(prompt),
        kv(kv),
        selector(selector),
        config(executor.model().config()),
        replay(config, kv.kept().get(), static_cast<int32_t>(prompt.size()), static_cast<int32_t>(kv.num_tokens()),
               selector) {}

  // The next layers with the same columns, from layers.end on.
  void BeginLayers() {
    layers.begin = layers.end;
    if (layers.begin >= config.num_layers) return;
    columns = replay.Columns(layers.begin);
    while (layers.end < config.num_layers && replay.Columns(layers.end) == columns) ++layers.end;
    sums.assign(static_cast<size_t>(layers.end * config.num_kv_heads) * static_cast<size_t>(CountOf(columns)), 0);
    next_row = 0;
  }
  void ChooseOfLayers();

  ParallelExecutor& executor;
  const std::span<const int32_t> prompt;
  const SequenceKv& kv;
  const PromptSelector& selector;
  const ModelConfig& config;
  const Replay replay;
  PromptKept kept;                          // whole lists of layers without a choice
  std::vector<std::vector<int32_t>> lists;  // of each layer, where tokens were left out
  std::unique_ptr<RecoveryPolicy> policy;
  std::unique_ptr<SequenceKv> own;  // with pages of its own for the rows
  LayerRange layers{0, 0};          // being scored; from num_layers on: done
  PositionRanges columns;           // that are chosen from
  std::vector<float> sums;          // [layers.end][num_kv_heads][columns], of layers in front of layers.begin zero
  int32_t next_row = 0;
};

// The heads of the scored layers choose.
void PromptChoice::State::ChooseOfLayers() {
  const std::vector<int32_t> positions = PositionsOf(columns);
  const size_t of_layer = static_cast<size_t>(config.num_kv_heads) * positions.size();
  for (int32_t layer = layers.begin; layer < layers.end; ++layer) {
    // A layer with a window: all of its heads keep that.
    if (!selector.Lists(layer, 0) && !selector.Chooses(layer, 0)) continue;
    const auto chosen = selector.Keep(std::span(sums).subspan(static_cast<size_t>(layer) * of_layer, of_layer),
                                      static_cast<int32_t>(positions.size()));
    for (int32_t h = 0; h < config.num_kv_heads; ++h) {
      const int32_t stream = layer * config.num_kv_heads + h;
      std::vector<int32_t>& list = kept.positions[stream];
      std::vector<int32_t> next;
      for (const int32_t column : chosen[h]) next.push_back(positions[column]);
      if (selector.accumulates()) {
        const size_t first = stream * positions.size();
        for (const int32_t column : chosen[h]) kept.attention[stream].push_back(sums[first + column]);
      } else if (kv.kept() != nullptr) {
        next.insert(next.end(), std::lower_bound(list.begin(), list.end(), replay.tail), list.end());
      } else {
        for (int64_t j = replay.tail; j < kv.num_tokens(); ++j) next.push_back(static_cast<int32_t>(j));
      }
      list = std::move(next);
    }
  }
}

PromptChoice::PromptChoice(std::unique_ptr<State> state) : state_(std::move(state)) {}
PromptChoice::~PromptChoice() = default;

absl::StatusOr<std::unique_ptr<PromptChoice>> PromptChoice::Begin(ParallelExecutor& executor,
                                                                  std::span<const int32_t> prompt, const SequenceKv& kv,
                                                                  const PromptSelector& selector) {
  const ModelConfig& config = executor.model().config();
  const auto length = static_cast<int32_t>(prompt.size());
  if (length == 0 || length > kv.num_tokens())
    return InvalidArgument(
        "decode selector '{}' runs the prompt's last tokens again and was given {} of the {} tokens that have KV",
        selector.name(), length, kv.num_tokens());
  auto state = std::make_unique<State>(executor, prompt, kv, selector);
  const Replay& replay = state->replay;
  const auto longest = std::max_element(replay.layers.begin(), replay.layers.end(),
                                        [](const auto& a, const auto& b) { return CountOf(a) < CountOf(b); });
  if (!selector.chooses_of(CountOf(*longest)) || replay.rows.empty()) {
    state->layers = {config.num_layers, config.num_layers};
    return std::unique_ptr<PromptChoice>(new PromptChoice(std::move(state)));
  }
  // Whole lists first: of layers that choose nothing, and what is there behind the prompt.
  state->kept.positions.resize(config.num_layers * config.num_kv_heads);
  if (selector.accumulates()) state->kept.attention.resize(state->kept.positions.size());
  if (kv.kept() != nullptr) {
    for (const PositionRanges& layer : kv.kept()->layers) state->lists.push_back(PositionsOf(layer));
    state->policy = std::make_unique<KeptRowsPolicy>(config, state->lists);
    for (size_t stream = 0; stream < state->kept.positions.size(); ++stream)
      state->kept.positions[stream] = state->lists[stream / static_cast<size_t>(config.num_kv_heads)];
  } else {
    SPLICE_ASSIGN_OR_RETURN(state->policy, MakeRecoveryPolicy({.policy = "exact"}, config));
  }
  SPLICE_ASSIGN_OR_RETURN(state->own, kv.Fork(replay.rows.front()));
  state->layers.end = selector.scoring().first_layer;
  state->BeginLayers();
  return std::unique_ptr<PromptChoice>(new PromptChoice(std::move(state)));
}

bool PromptChoice::done() const { return state_->layers.begin >= state_->config.num_layers; }

absl::Status PromptChoice::RunSlice() {
  State& s = *state_;
  const auto num_rows = static_cast<int32_t>(s.replay.rows.size());
  const int32_t end = std::min(s.next_row + s.executor.max_rows(), num_rows);
  const auto positions = std::span(s.replay.rows).subspan(s.next_row, end - s.next_row);
  std::vector<int32_t> tokens;
  for (const int32_t p : positions) tokens.push_back(s.prompt[p]);
  const PrefillSlice rows{.tokens = tokens, .positions = positions, .kv = s.own.get(), .policy = s.policy.get()};
  // No row sees what is behind it, and of that nothing may be written yet.
  const PositionRange seen{0, positions.back() + 1};
  SPLICE_RETURN_IF_ERROR(AddAttention(s.executor, rows, s.layers, IntersectionOf(s.columns, {&seen, 1}),
                                      static_cast<size_t>(CountOf(s.columns)), s.sums));
  s.next_row = end;
  if (end < num_rows) return absl::OkStatus();
  s.ChooseOfLayers();
  s.BeginLayers();
  return absl::OkStatus();
}

PromptKept PromptChoice::Take() {
  SPLICE_CHECK(done(), "a choice that is done");
  return std::move(state_->kept);
}

absl::StatusOr<PromptKept> ChooseOfPrompt(ParallelExecutor& executor, std::span<const int32_t> prompt,
                                          const SequenceKv& kv, const PromptSelector& selector) {
  SPLICE_ASSIGN_OR_RETURN(const auto choice, PromptChoice::Begin(executor, prompt, kv, selector));
  while (!choice->done()) SPLICE_RETURN_IF_ERROR(choice->RunSlice());
  return choice->Take();
}

absl::Status KeepPositions(const Model& model, PagePool& pool, const PromptKept& kept, int64_t num_tokens,
                           PromptSelector& selector, const CompactPages& compact) {
  const KeptPositions& positions = kept.positions;
  if (positions.empty()) return absl::OkStatus();
  if (selector.accumulates()) {
    SPLICE_RETURN_IF_ERROR(WriteHeavyHitters(model, pool, positions, kept.attention, compact));
  } else {
    SPLICE_RETURN_IF_ERROR(WriteKeptPositions(model, pool, positions, compact));
  }
  const std::vector<bool>& lists = selector.accumulates() ? compact.needs().streams : compact.needs().lists;
  size_t longest = 0;
  for (size_t stream = 0; stream < positions.size(); ++stream) {
    if (lists[stream]) longest = std::max(longest, positions[stream].size());
  }
  if (longest > 0) selector.SetKept(static_cast<int64_t>(longest), num_tokens);
  return absl::OkStatus();
}

}  // namespace spl::engine
