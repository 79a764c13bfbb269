#include "services/engine/runtime/prompt_run.h"

#include <algorithm>
#include <optional>

#include "services/base/check.h"
#include "services/base/status.h"
#include "services/engine/cache/segment_summary.h"
#include "services/engine/execution/observers/column_scoring.h"
#include "services/engine/execution/observers/fusion.h"
#include "services/engine/execution/observers/open_rows.h"
#include "services/engine/execution/observers/query_means.h"
#include "services/engine/execution/observers/value_deviation.h"
#include "services/engine/runtime/prompt_layout.h"

namespace spl::engine {
PromptRun::PromptRun(std::span<const int32_t> tokens, std::vector<SegmentHit> hits, SequenceKv& kv,
                     RecoveryPolicy& policy)
    : PromptRun(tokens, hits, LayoutOf(tokens, kv.num_tokens(), hits), kv, policy) {}

PromptRun::PromptRun(std::span<const int32_t> tokens, std::vector<SegmentHit> hits, ReuseLayout layout, SequenceKv& kv,
                     RecoveryPolicy& policy)
    : tokens_(tokens),
      hits_(std::move(hits)),
      kv_(kv),
      policy_(policy),
      num_layers_(kv.shape().num_layers),
      layout_(std::move(layout)),
      copied_(CountCopies(layout_)),
      foreign_(ForeignCopies(layout_)),
      untouched_(PagesWithout(PositionRanges{layout_.active()}, layout_.num_tokens)),
      given_(num_layers_) {
  SPLICE_CHECK(hits_.size() == layout_.reused.size(), "a copy for each hit");
  exact_ = !reuses() && policy_.is_exact(layout_) && kv.exact_tokens() == kv.num_tokens();
  aligned_tokens_ = reused_tokens();
  const bool all_rows = policy_.is_exact(layout_);
  if (!all_rows || !hits_.empty())
    kv_.LowerProvenance(chunk::Provenance::kApprox, all_rows ? layout_.reused.front().begin : layout_.num_prefix);
}

absl::Status PromptRun::Begin(ParallelExecutor& executor) {
  if (policy_.wants_summaries() && reuses()) SPLICE_RETURN_IF_ERROR(GiveSummaries(executor.model()));
  PrefillStage first = policy_.FirstStage(layout_);
  if (!policy_.is_exact(layout_)) {
    const Model& model = executor.model();
    for (int r = 0; r < model.num_ranks(); ++r) {
      const int32_t most = policy_.RestoreCap(model.rank(r).first_kv_head(), model.rank(r).config().num_kv_heads);
      restores_.push_back(std::make_unique<HeadRestore>(most, layout_.num_tokens));
      sparse_ffns_.push_back(std::make_unique<SparseFfn>());
    }
  }
  SPLICE_RETURN_IF_ERROR(AlignCopies(executor, hits_));
  untouched_ = PagesWithout(policy_.RowsOfAllStages(layout_), layout_.num_tokens);
  return Enter(executor, std::move(first));
}

absl::Status PromptRun::AlignCopies(ParallelExecutor& executor, std::span<const SegmentHit> hits) const {
  const Model& model = executor.model();
  for (const Range& layers :
       AlignStretches(hits, {policy_.first_cached_layer(), num_layers_}, kv_.shape().num_kv_heads))
    SPLICE_RETURN_IF_ERROR(executor.AlignCopy(MakeAlignPlans(hits, kv_, layers, model.config(), model.num_ranks())));
  return absl::OkStatus();
}

// A source that is copied as a whole has its summary with it; that of a part is made from its pages.
absl::Status PromptRun::GiveSummaries(const Model& model) {
  std::vector<CopySummary> summaries;
  for (const SegmentHit& hit : hits_) {
    const bool whole = hit.num_tokens == static_cast<int32_t>(hit.source->tokens().size());
    std::shared_ptr<const SegmentSummary> known = whole ? hit.source->summary() : nullptr;
    const bool computes = policy_.wants_tile_means() && (known == nullptr || known->tile_means.empty());
    if (computes) {
      SPLICE_ASSIGN_OR_RETURN(SegmentSummary keys, SummarizeKeys(hit, model.config(), model.kv_dtype()));
      known = whole ? hit.source->KeepSummary(std::move(keys)) : std::make_shared<SegmentSummary>(std::move(keys));
    }
    if (known == nullptr) known = std::make_shared<SegmentSummary>();
    if (computes || (policy_.wants_local_queries() && known->local_query.empty())) ++summaries_computed_;
    SegmentSummary turned = TurnSummary(*known, hit.distance(), model.config());
    summaries.push_back({std::move(turned.tile_means), std::move(turned.local_query), std::move(turned.attended)});
  }
  policy_.SetSummaries(std::move(summaries));
  return absl::OkStatus();
}

absl::Status PromptRun::GiveQueryMeans(ParallelExecutor& executor) {
  std::vector<float> means(query_sums_.size());
  const size_t group_size = means.size() / stage_.query_means.size();
  for (size_t i = 0; i < means.size(); ++i)
    means[i] = static_cast<float>(query_sums_[i] / stage_.query_means[i / group_size].size());
  SPLICE_ASSIGN_OR_RETURN(std::vector<std::vector<int32_t>> attended, ReadAttended(executor));
  if (stage_.summary_of >= 0) {
    SPLICE_CHECK(attended.size() == 1, "a summary is of one copy");
    const SegmentHit& hit = hits_[stage_.summary_of];
    const ModelConfig& config = executor.model().config();
    // Through what is kept: a prompt that finds it there chooses by the same bits.
    SegmentSummary stored = TurnSummary({{}, std::move(means), attended[0]}, -hit.distance(), config);
    for (int32_t& position : stored.attended) position -= hit.target;
    means = TurnSummary(stored, hit.distance(), config).local_query;
    // Turning there and back rounds: the bits depend on the position in this prompt.
    if (!hit.shared && hit.num_tokens == static_cast<int32_t>(hit.source->tokens().size()))
      hit.source->KeepSummary(stored);
    SPLICE_RETURN_IF_ERROR(AlignCopies(executor, {&hit, 1}));  // the stage wrote over the copy
  }
  policy_.TakeQueryMeans(std::move(means));
  if (!attended.empty()) policy_.TakeAttended(std::move(attended));
  return absl::OkStatus();
}

// From here on the prompt is what is left of it.
absl::Status PromptRun::Compact(ParallelExecutor& executor, const PositionRanges& only) {
  SPLICE_CHECK(only_.empty() && !only.empty() && only.front().begin == 0 && only.front().end >= layout_.num_prefix &&
                   only.back().end == layout_.num_tokens,
               "a prompt is compacted once, around its prefix and its last position");
  const Model& model = executor.model();
  for (const std::vector<AlignPlan>& step : MakeCompactPlans(only, kv_, model.config(), model.num_ranks()))
    SPLICE_RETURN_IF_ERROR(executor.AlignCopy(step));
  const PositionRanges copies = MergeRanges(layout_.reused);
  left_share_ = static_cast<double>(CountOf(IntersectionOf(copies, only))) / static_cast<double>(CountOf(copies));
  recomputed_dropped_ = CountOf(recomputed_rows_);
  recomputed_rows_ = NumberedWithin(recomputed_rows_, only);
  recomputed_dropped_ -= CountOf(recomputed_rows_);
  for (const PositionRange& range : only)
    left_tokens_.insert(left_tokens_.end(), tokens_.begin() + range.begin, tokens_.begin() + range.end);
  tokens_ = left_tokens_;
  layout_ = layout_.Only(only);
  hidden_.clear();
  only_ = only;
  return absl::OkStatus();
}

// The positions that the stage's rows attend to most, of each of attention_to.
absl::StatusOr<std::vector<std::vector<int32_t>>> PromptRun::ReadAttended(ParallelExecutor& executor) {
  std::vector<std::vector<int32_t>> attended;
  std::vector<float> scores;
  if (!attention_.empty()) {
    SPLICE_ASSIGN_OR_RETURN(scores, executor.ReadScores(attention_, CountOf(stage_.attention_to)));
    attention_.clear();
  }
  size_t begin = 0;
  for (const PositionRange& range : stage_.attention_to) {
    attended.push_back(MostAttended(std::span(scores).subspan(begin, range.size())));
    for (int32_t& position : attended.back()) position += range.begin;
    begin += static_cast<size_t>(range.size());
  }
  return attended;
}

absl::Status PromptRun::Enter(ParallelExecutor& executor, PrefillStage stage) {
  if (!stage.only.empty()) SPLICE_RETURN_IF_ERROR(Compact(executor, stage.only));
  SPLICE_CHECK(!stage.rows.empty() && stage.layers.begin < stage.layers.end && stage.layers.end <= num_layers_,
               "a stage has rows and layers");
  stage_ = std::move(stage);
  num_rows_ = CountOf(stage_.rows);
  next_row_ = 0;
  final_ = final_with_pass_ = FinalBehindRow(0);
  seen_.reset();
  if (!stage_.unseen.empty()) seen_.emplace(kv_, stage_.unseen, layout_.num_tokens);
  SPLICE_CHECK(!stage_.whole || (num_rows_ == stage_.rows.front().size() && !scores() && alone()),
               "a whole stage has rows without gaps, and nobody beside them");
  if (stage_.whole && line_reports_.empty()) line_reports_.resize(executor.model().num_ranks());
  if ((stage_.keep_hidden || stage_.whole) && hidden_.empty()) {
    SPLICE_ASSIGN_OR_RETURN(hidden_, executor.AllocateHidden(layout_.active()));
  }
  query_sums_.assign(stage_.query_means.size() * static_cast<size_t>(num_layers_) *
                         static_cast<size_t>(executor.model().config().q_size()),
                     0);
  return MakeObservers(executor);
}

absl::Status PromptRun::MakeObservers(ParallelExecutor& executor) {
  if (CountOf(stage_.attention_to) > 0) {
    SPLICE_CHECK(stage_.attention_to.size() == stage_.query_means.size(), "whose attention is asked for has a mean");
    SPLICE_ASSIGN_OR_RETURN(attention_, executor.TakeScores(CountOf(stage_.attention_to)));
  }
  if (scores()) {
    SPLICE_ASSIGN_OR_RETURN(scores_, executor.TakeScores(CountOf(stage_.score.candidates)));
  }
  stage_observers_.clear();
  observers_.assign(static_cast<size_t>(executor.model().num_ranks()), {});
  for (size_t r = 0; r < observers_.size(); ++r) {
    const auto add = [&](std::unique_ptr<LayerObserver> observer) {
      observers_[r].push_back(observer.get());
      stage_observers_.push_back(std::move(observer));
    };
    if (stage_.open_from < layout_.num_tokens) add(std::make_unique<OpenRows>(stage_.open_from));
    if (!restores_.empty()) {
      observers_[r].push_back(restores_[r].get());
      observers_[r].push_back(sparse_ffns_[r].get());
    }
    if (!stage_.fuse.empty()) add(std::make_unique<Fusion>(stage_.fuse));
    if (!stage_.query_means.empty()) add(MakeQueryMeans(r));
    if (scores()) add(MakeScoring(r));
  }
  return absl::OkStatus();
}

std::unique_ptr<LayerObserver> PromptRun::MakeQueryMeans(size_t rank) {
  std::vector<QueryMeans::Group> groups;
  const size_t group_size = query_sums_.size() / stage_.query_means.size();
  float* scores = attention_.empty() ? nullptr : static_cast<float*>(attention_[rank]->data());
  for (size_t i = 0; i < stage_.query_means.size(); ++i) {
    groups.push_back({.rows = stage_.query_means[i], .sums = query_sums_.data() + i * group_size});
    if (scores == nullptr) continue;
    groups.back().attention_to = stage_.attention_to[i];
    groups.back().scores = scores;
    scores += stage_.attention_to[i].size();
  }
  return std::make_unique<QueryMeans>(std::move(groups));
}

std::unique_ptr<LayerObserver> PromptRun::MakeScoring(size_t rank) const {
  const ScoreRequest& request = stage_.score;
  float* const scores = static_cast<float*>(scores_[rank]->data());
  if (request.kind == ScoreKind::kValueDeviation)
    return std::make_unique<ValueDeviation>(request.layer, request.candidates, scores);
  const auto seen = [&](const PositionRanges& ranges) { return seen_.has_value() ? seen_->SlotsOf(ranges) : ranges; };
  return std::make_unique<ColumnScoring>(ColumnScoringOptions{.layer = request.layer,
                                                              .all_layers = request.all_layers,
                                                              .probes = seen(request.probes),
                                                              .candidates = seen(request.candidates),
                                                              .kv_heads = request.kv_heads,
                                                              .scores = scores});
}

int32_t PromptRun::RowAt(int64_t index) const {
  for (const PositionRange& range : stage_.rows) {
    if (index < range.size()) return range.begin + static_cast<int32_t>(index);
    index -= range.size();
  }
  return layout_.num_tokens;
}

bool PromptRun::may_skip() const {
  return !done_ && exact_ && layers() == PassLayers{{0, num_layers_}} && stage_.final_before >= layout_.num_tokens &&
         stage_.rows.size() == 1 && stage_observers_.empty();
}

void PromptRun::NoteWritten(const PositionRange& written) {
  const PageRange pages{written.begin / kernels::kPageTokens, written.end / kernels::kPageTokens};
  untouched_ = UnionOf(untouched_, {&pages, 1});
}

void PromptRun::Skip(const PositionRange& written) {
  SPLICE_CHECK(may_skip() && written.begin == next_position() && written.end < layout_.num_tokens, "rows are left");
  NoteWritten(written);
  next_row_ += written.size();
}

PositionRanges PromptRun::RowsFrom(int64_t row) const {
  const PositionRange rest{RowAt(row), layout_.num_tokens};
  return IntersectionOf(stage_.rows, {&rest, 1});
}

PageRanges PromptRun::FinalBehindRow(int64_t row) const {
  return PagesWithout(RowsFrom(row), layout_.num_tokens, stage_.final_before);
}

PageRanges PromptRun::TakeFinalPages(int32_t layer, Final when) {
  const bool runs = layer >= stage_.layers.begin && layer < stage_.layers.end - (stage_.keys_only_last ? 1 : 0);
  if (!runs) return given_.Give(layer, untouched_);
  return given_.Give(layer, UnionOf(untouched_, when == Final::kNow ? final_ : final_with_pass_));
}

PrefillSlice PromptRun::Next(int32_t room, bool whole_pages) {
  const int64_t left = num_rows_ - next_row_;
  int64_t count = stage_.whole ? left : std::min<int64_t>(room, left);
  if (count > 0 && count < left && !layout_.reused.empty()) {
    // A recovery's rows are few passes: even ones, of whole tiles, for a short last one would leave a device half idle.
    constexpr int64_t kTile = 2 * kernels::kPageTokens;
    const int64_t passes = (left + room - 1) / room, even = (left + passes - 1) / passes;
    count = std::min(count, (even + kTile - 1) / kTile * kTile);
  }
  const int64_t end_row = next_row_ + count;
  if (whole_pages && end_row < num_rows_ && !scores()) {
    const int32_t next = RowAt(end_row), over = next % kernels::kPageTokens;
    if (over >= count) {
      count = 0;
    } else if (RowAt(end_row - over) == next - over) {
      count -= over;
    }
  }
  pass_positions_.clear();
  for (const PositionRange& range : RowsFrom(next_row_)) {
    for (int32_t p = range.begin; p < range.end && static_cast<int64_t>(pass_positions_.size()) < count; ++p)
      pass_positions_.push_back(p);
  }
  pass_tokens_.clear();
  for (const int32_t position : pass_positions_) pass_tokens_.push_back(tokens_[position]);
  if (count == 0) return {};
  final_with_pass_ = FinalBehindRow(next_row_ + count);
  PrefillSlice slice{.tokens = pass_tokens_,
                     .positions = pass_positions_,
                     .kv = &kv_,
                     .policy = &policy_,
                     .hidden = hidden_.empty() ? nullptr : hidden_.data(),
                     .observers = observers_[0].empty() ? nullptr : observers_.data(),
                     .lines = stage_.whole ? line_reports_.data() : nullptr};
  if (seen_.has_value()) seen_->Place(slice);
  return slice;
}

absl::StatusOr<std::vector<int32_t>> PromptRun::Selected(ParallelExecutor& executor) const {
  const ScoreRequest& request = stage_.score;
  if (request.kind == ScoreKind::kNone) return std::vector<int32_t>();
  if (request.give_scores) {
    SPLICE_ASSIGN_OR_RETURN(std::vector<float> scores, executor.ReadScores(scores_, CountOf(request.candidates)));
    policy_.TakeScores(std::move(scores));
    return std::vector<int32_t>();
  }
  SPLICE_ASSIGN_OR_RETURN(std::vector<int32_t> indices,
                          executor.SelectTop(scores_, CountOf(request.candidates), request.pool_radius, request.k));
  ToPositions(indices, request.candidates);
  return indices;
}

absl::Status PromptRun::Finish(ParallelExecutor& executor) {
  next_row_ += static_cast<int64_t>(pass_positions_.size());
  final_ = final_with_pass_;
  if (next_row_ < num_rows_) return absl::OkStatus();
  if (stage_.layers.end == num_layers_ && !stage_.keys_only_last && stage_.summary_of < 0) NoteRecomputed();
  if (!stage_.query_means.empty()) SPLICE_RETURN_IF_ERROR(GiveQueryMeans(executor));
  SPLICE_ASSIGN_OR_RETURN(const std::vector<int32_t> selected, Selected(executor));
  scores_.clear();
  std::optional<PrefillStage> next = policy_.NextStage(layout_, selected);
  if (next.has_value()) return Enter(executor, *std::move(next));
  SPLICE_CHECK(stage_.layers.end == num_layers_ && stage_.rows.back().end == layout_.num_tokens,
               "the last stage computes the last position");
  hidden_.clear();
  kv_.set_num_tokens(layout_.num_tokens);
  done_ = true;
  return absl::OkStatus();
}

void PromptRun::NoteRecomputed() {
  if (layout_.reused.empty()) return;
  recomputed_rows_ = UnionOf(recomputed_rows_, IntersectionOf(stage_.rows, MergeRanges(layout_.reused)));
  if (only_.empty()) recomputed_for_ = CountRecomputed(recomputed_rows_, policy_.Edges(layout_));
}

void PromptRun::Report(PrefillStats& stats) const {
  stats.exact = exact_;
  stats.aligned_tokens = aligned_tokens_;
  stats.copied = copied_;
  stats.computed_tokens = stats.prompt_tokens - stats.cached_tokens - aligned_tokens_;
  stats.recomputed_tokens = recomputed_tokens();
  stats.recomputed_for = recomputed_for_;
  stats.recomputed_for.chosen =
      stats.recomputed_tokens - recomputed_for_.links - recomputed_for_.beside_new - recomputed_for_.tail;
  stats.probe_layers = policy_.probe_layers();
  stats.dense_layers = reuses() ? policy_.dense_layers_run() : 0;
  stats.restored_heads = static_cast<int64_t>(restored_heads().size());
  stats.ffn_share = ffn_share();
  stats.kept_share = kept_share();
  stats.summaries_computed = summaries_computed_;
  stats.lines = lines();
}

std::vector<int32_t> PromptRun::restored_heads() const {
  std::vector<int32_t> heads;
  for (const auto& restore : restores_)
    heads.insert(heads.end(), restore->restored().begin(), restore->restored().end());
  std::sort(heads.begin(), heads.end());
  return heads;
}

double PromptRun::kept_share() const {
  if (!only_.empty()) return left_share_;
  if (policy_.kept().empty() || layout_.reused.empty()) return 1;
  const PositionRanges copies = MergeRanges(layout_.reused);
  int64_t count = 0;
  for (const PositionRanges& ranges : policy_.kept()) count += CountOf(IntersectionOf(ranges, copies));
  return static_cast<double>(count) / static_cast<double>(CountOf(copies) * num_layers_);
}

LineReport PromptRun::lines() const {
  LineReport all;
  for (const LineReport& report : line_reports_) all.Add(report);
  return all;
}

double PromptRun::pass_work() const {
  return static_cast<double>(pass_positions_.size()) * (stage_.layers.end - stage_.layers.begin) / num_layers_;
}

double PromptRun::remaining_work() const {
  if (done_) return 0;
  const double share = static_cast<double>(stage_.layers.end - stage_.layers.begin) / num_layers_;
  double work = static_cast<double>(num_rows_ - next_row_) * share;
  if (stage_.layers.end < num_layers_) {  // about what the chosen rows will cost
    constexpr double kChosenShare = 1.0 / 16;
    const double rows =
        static_cast<double>(CountOf(layout_.fresh())) + kChosenShare * static_cast<double>(reused_tokens());
    // Without kept hidden states they begin at layer 0 again.
    const int32_t begin = stage_.keep_hidden || stage_.layers.begin > 0 ? stage_.layers.end : 0;
    work += rows * (num_layers_ - begin) / num_layers_;
  }
  return work;
}

}  // namespace spl::engine
