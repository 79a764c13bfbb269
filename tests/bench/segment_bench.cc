// Segment reuse and head classes on a model of a real shape: time to the first token with most of the prompt cached
// elsewhere, by method, against computing it, in one run; and the kernels against what their bytes and operations cost.
//
// Beside each method stands what its work costs at the rates given for linear operations and for attention. Counted is
// what the passes ask for: a method that computes less has less to pay, but pays it at the same rates.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "services/base/status.h"
#include "services/engine/engine.h"
#include "services/engine/execution/observers/column_scoring.h"
#include "services/engine/methods/recovery_methods.h"
#include "services/engine/model/random_weights.h"
#include "services/engine/runtime/prompt_run.h"
#include "services/worker_flags/worker_flags.h"
#include "tests/bench/median.h"

namespace spl {
namespace {

using Clock = std::chrono::steady_clock;

struct Flags {
  std::string kv_dtype = "auto";
  std::string shape = "llama-3.1-8b";
  std::string model_dir;
  std::string backend = "cuda";
  std::string head_classes = "auto";
  std::vector<std::string> methods = {"exact", "sparsex"};
  std::vector<int32_t> lengths = {32768};
  int32_t segments = 16;
  double reuse = 0.9;
  int32_t slice = 4096;
  int32_t dense_layers = -1, probe_layers = -1, score_layers = -1;  // the policy's own
  int32_t probe_tokens = -1;
  double recompute_share = -1;  // each method's own
  int32_t repeats = 5;
  double linear_tflops = 680, attention_tflops = 590;
  double max_seconds = 600;
  bool skip_kernels = false, stages = false, json = false;
};

double Seconds(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Median seconds of `work` on the session's queue, repeated so that starting it costs nothing beside it.
template <typename Work>
absl::StatusOr<double> Time(engine::ParallelExecutor& executor, int32_t repeats, const Work& work, int batch = 10) {
  std::vector<double> times;
  for (int32_t i = 0; i <= repeats; ++i) {
    SPLICE_RETURN_IF_ERROR(executor.context().session->Synchronize());
    const auto start = Clock::now();
    for (int j = 0; j < batch; ++j) SPLICE_RETURN_IF_ERROR(work());
    SPLICE_RETURN_IF_ERROR(executor.context().session->Synchronize());
    if (i > 0) times.push_back(Seconds(start) / batch);
  }
  return Median(times);
}

// Floating point operations of the passes of one prompt.
struct Work {
  double projections = 0, attention = 0, local_attention = 0, scores = 0;  // local: of heads with a window
  double line_attention = 0;  // of heads that choose lines, if they had everything
  double ffn = 0;             // if all rows ran through feed-forward
  double ffn_share = 1;

  double linear() const { return projections + ffn * ffn_share; }
  double all_attention() const { return attention + local_attention + scores; }
};

// A pass, or what lies between two.
struct StageTime {
  std::string what;
  double seconds = 0;
};

struct Result {
  double seconds = 0;
  int64_t recomputed = 0, restored = 0;
  engine::LineReport lines;
  Work work;
  std::vector<StageTime> stages;
  std::shared_ptr<engine::SequenceKv> kv;
};

class Bench {
 public:
  explicit Bench(const Flags& flags) : flags_(flags) {}

  absl::Status Run() {
    SPLICE_RETURN_IF_ERROR(Load());
    SPLICE_ASSIGN_OR_RETURN(const double bandwidth, CopyRate());
    Report("copy_bytes_per_s", bandwidth, fmt::format("device copy {:.3f} TB/s (read plus write)", bandwidth / 1e12));
    for (const int32_t length : flags_.lengths) {
      tokens_ = length;
      SPLICE_RETURN_IF_ERROR(FirstTokens());
      if (flags_.skip_kernels || length != flags_.lengths.back() || hits_.empty()) continue;
      SPLICE_RETURN_IF_ERROR(Align(bandwidth));
      SPLICE_RETURN_IF_ERROR(Scores());
      SPLICE_RETURN_IF_ERROR(Top());
    }
    if (flags_.json) fmt::print("{}\n", out_.dump(1));
    return absl::OkStatus();
  }

 private:
  void Report(const std::string& name, double value, const std::string& line) {
    out_[name] = value;
    fmt::print("{}\n", line);
    std::fflush(stdout);
  }

  absl::Status Load() {
    const int32_t longest = *std::max_element(flags_.lengths.begin(), flags_.lengths.end());
    SPLICE_ASSIGN_OR_RETURN(std::shared_ptr<const kernels::Backend> backend, MakeBackend(flags_.backend));
    SPLICE_ASSIGN_OR_RETURN(const auto kv_dtype, KvTypeFromName(flags_.kv_dtype));
    if (flags_.model_dir.empty()) {
      SPLICE_ASSIGN_OR_RETURN(engine::RandomModel random, engine::ParseRandomModel(flags_.shape));
      random.config.max_positions = std::max(random.config.max_positions, longest);  // what it computes costs the same
      SPLICE_ASSIGN_OR_RETURN(
          model_,
          engine::Model::LoadRandom(random, backend, {.kv_dtype = kv_dtype, .head_classes = flags_.head_classes}));
    } else {
      SPLICE_ASSIGN_OR_RETURN(model_, engine::Model::Load(flags_.model_dir, backend,
                                                          {.kv_dtype = kv_dtype, .head_classes = flags_.head_classes}));
    }
    const engine::ModelConfig& c = model_->config();
    const auto& classes = model_->head_classes();
    const std::string global =
        classes == nullptr ? "none" : fmt::format("{:.0f} % global", 100 * classes->global_share());
    fmt::print("{}\nmodel {}, {:.0f} % of the tokens in {} segments, head classes: {}\n", backend->description(),
               c.name, 100 * flags_.reuse, flags_.segments, global);
    out_["model"] = c.name;
    out_["head_classes"] = global;
    const int64_t pages = engine::PagesForTokens(c, 2ll * longest + 4 * kernels::kPageTokens);
    SPLICE_ASSIGN_OR_RETURN(memory_, backend->Allocate(pages * model_->page_bytes()));
    view_ = {static_cast<std::byte*>(memory_->data()), model_->kv_dtype(), c.head_dim, static_cast<int32_t>(pages)};
    pool_ = std::make_unique<engine::PagePool>(view_, backend.get());
    SPLICE_ASSIGN_OR_RETURN(executor_, engine::ParallelExecutor::Create(
                                           model_, view_, {.max_rows = flags_.slice, .max_span_rows = longest}));
    for (int32_t i = 0; i < longest; ++i) prompt_.push_back(static_cast<int32_t>((i * 7919ll) % c.vocab_size));
    return absl::OkStatus();
  }

  absl::StatusOr<double> CopyRate() {
    const kernels::Backend& backend = model_->backend();
    const size_t bytes = std::min<size_t>(size_t{1} << 31, memory_->size() / 2);
    std::vector<kernels::CopyOp> ops(8, {static_cast<std::byte*>(memory_->data()) + bytes, memory_->data(), bytes});
    double best = 0;
    for (int i = 0; i < 4; ++i) {
      const auto start = Clock::now();
      SPLICE_RETURN_IF_ERROR(backend.Copy(kernels::CopyKind::kWithin, ops));
      best = std::max(best, 2.0 * static_cast<double>(bytes * ops.size()) / Seconds(start));
    }
    return best;
  }

  // What `slice` asks for in the layers of `pass`.
  void Count(const engine::PrefillSlice& slice, const engine::PassLayers& pass, Work& work) const {
    const engine::ModelConfig& c = model_->config();
    const auto rows = static_cast<double>(slice.tokens.size());
    const double hidden = c.hidden_size;
    double all = 0;  // (row, key) pairs of a head that sees everything
    for (const int32_t p : slice.positions) all += p + 1.0;
    for (int32_t layer = pass.layers.begin; layer < pass.layers.end; ++layer) {
      const bool last = layer + 1 == pass.layers.end;
      const bool keys_only = last && pass.keys_only_last, attention_only = last && pass.attention_only_last;
      work.projections += 2 * rows * hidden * (2 * c.kv_size() + (keys_only ? 0 : c.q_size()));
      if (keys_only) continue;
      const engine::LayerPlan plan = slice.policy->PlanLayer(layer);
      for (const kernels::HeadVisibility& head : plan.visibility) {
        const double per_pair = 4.0 * c.head_dim * c.num_qo_heads / c.num_kv_heads;
        if (head.rule == kernels::VisibilityRule::kFull) {
          (plan.lines != nullptr ? work.line_attention : work.attention) += per_pair * all;
          continue;
        }
        double pairs = 0;
        if (head.rule == kernels::VisibilityRule::kList) {
          size_t seen = 0;  // entries up to the row
          for (const int32_t p : slice.positions) {
            while (seen < head.indices.size() && head.indices[seen] <= p) ++seen;
            pairs += static_cast<double>(seen);
          }
          work.attention += per_pair * pairs;
          continue;
        }
        for (const int32_t p : slice.positions) {
          const int32_t behind = std::max(0, p + 1 - head.window);
          pairs += std::min(p + 1, head.window) + std::min(behind, head.num_sinks);
        }
        work.local_attention += per_pair * pairs;
      }
      if (attention_only) continue;
      work.projections += 2 * rows * hidden * c.q_size();
      const int32_t width =
          c.is_moe_layer(layer) ? c.moe.intermediate_size * c.moe.num_experts_per_token : c.intermediate_size;
      work.ffn += 6 * rows * hidden * width;
    }
    if (slice.observers == nullptr) return;
    for (const engine::LayerObserver* const observer : *slice.observers) {
      const auto* const scoring = dynamic_cast<const engine::ColumnScoring*>(observer);
      if (scoring == nullptr) continue;
      const engine::ColumnScoringOptions& score = scoring->options();
      const double heads = score.kv_heads.empty() ? c.num_kv_heads : static_cast<double>(score.kv_heads.front().size());
      for (const int32_t p : slice.positions) {
        if (!engine::ContainsPosition(score.probes, p)) continue;
        const engine::PositionRange seen{0, p + 1};
        work.scores += 2.0 * c.head_dim * c.num_qo_heads / c.num_kv_heads * heads *
                       static_cast<double>(engine::CountOf(engine::IntersectionOf(score.candidates, {&seen, 1})));
      }
    }
  }

  absl::StatusOr<Result> RunPrompt(const std::string& method) {
    engine::ReuseOptions reuse{.policy = method == "cold" ? "sparsex" : method.substr(0, method.find('=')),
                               .dense_layers = flags_.dense_layers,
                               .recompute_share = flags_.recompute_share};
    if (reuse.policy == "sparsex-dense") {
      reuse.policy = "sparsex";
      reuse.probe_layers = 0;
    }
    if (reuse.policy == "sparsex-probe") {
      reuse.policy = "sparsex";
      reuse.dense_layers = -1;
      reuse.probe_layers = flags_.probe_layers;
      reuse.score_layers = flags_.score_layers;
      reuse.probe_tokens = flags_.probe_tokens;
    }
    if (reuse.policy.starts_with("samkv-")) {
      reuse.choose = reuse.policy.substr(6);
      reuse.policy = "samkv";
    }
    if (!engine::UsesHeadClasses(reuse) && (engine::RunsWholeSpans(reuse) || reuse.policy.ends_with("-shape")))
      reuse.dense_layers = -1;  // their own
    if (const size_t number = method.find('='); number != std::string::npos) {
      if (reuse.policy == "loopserve") reuse.line_alpha = std::stod(method.substr(number + 1));
      if (reuse.policy == "samkv") reuse.budget_ratio = std::stod(method.substr(number + 1));
      if (method.starts_with("sparsex-probe")) reuse.probe_layers = std::stoi(method.substr(number + 1));
      if (reuse.policy == "minference") reuse.line_slashes = std::stoi(method.substr(number + 1));
    }
    Result result;
    result.kv = std::make_shared<engine::SequenceKv>(*pool_, engine::KvShapeOf(model_->config()));
    SPLICE_RETURN_IF_ERROR(result.kv->Reserve(tokens_));
    SPLICE_ASSIGN_OR_RETURN(const auto policy,
                            engine::MakeRecoveryPolicy(reuse, model_->config(), model_->head_classes().get()));
    const auto start = Clock::now();
    double counting = 0;  // no part of the work
    auto mark = start;
    const auto note = [&](std::string what) {
      result.stages.push_back({std::move(what), Seconds(mark)});
      mark = Clock::now();
    };
    const bool reuses = policy->reuses_segments() && method != "cold";
    engine::PromptRun run(std::span<const int32_t>(prompt_).first(static_cast<size_t>(tokens_)),
                          reuses ? hits_ : std::vector<engine::SegmentHit>(), *result.kv, *policy);
    SPLICE_RETURN_IF_ERROR(run.Begin(*executor_));
    note("begin");
    int32_t last = 0;
    while (!run.done()) {
      const engine::PrefillSlice slice = run.Next(flags_.slice);
      const engine::PassLayers layers = run.layers();
      last = static_cast<int32_t>(slice.tokens.size()) - 1;
      SPLICE_RETURN_IF_ERROR(executor_->Prefill({&slice, 1}, layers));
      note(fmt::format("{} rows of layers {} to {}", slice.tokens.size(), layers.layers.begin, layers.layers.end));
      Count(slice, layers, result.work);
      counting += Seconds(mark);
      mark = Clock::now();
      SPLICE_RETURN_IF_ERROR(run.Finish(*executor_));
      note("between passes");
    }
    SPLICE_RETURN_IF_ERROR(executor_->ComputeLogits({&last, 1}));
    SPLICE_RETURN_IF_ERROR(executor_->Argmax().status());
    note("first token");
    result.seconds = Seconds(start) - counting;
    result.recomputed = run.recomputed_tokens();
    result.restored = static_cast<int64_t>(run.restored_heads().size());
    result.work.ffn_share = run.ffn_share();
    result.lines = run.lines();
    result.work.attention += result.work.line_attention * result.lines.cell_share();
    return result;
  }

  // The prompt's segments, computed once somewhere else, so that each must turn.
  void MakeHits(const engine::SequenceKv& kv) {
    hits_.clear();
    const auto reused = static_cast<int32_t>(flags_.reuse * tokens_), each = reused / flags_.segments;
    const int32_t fresh = tokens_ - each * flags_.segments;
    // Fresh text in front and behind; a segment comes from a place shifted by a few tokens.
    const int32_t begin = fresh / 2, shift = std::min(begin, 37);
    for (int32_t i = 0; i < flags_.segments; ++i) {
      const int32_t target = begin + i * each;
      const int32_t source = target - shift;
      hits_.push_back({std::make_shared<engine::SegmentSource>(
                           kv, source, std::span<const int32_t>(prompt_).subspan(static_cast<size_t>(target), each),
                           engine::SourceContext{}),
                       0, target, each});
    }
  }

  bool OutOfTime(const std::string& what) const {
    const bool over = Seconds(start_) > flags_.max_seconds;
    if (over) fmt::print("{}: left out, {:.0f} s are over\n", what, flags_.max_seconds);
    return over;
  }

  absl::Status FirstTokens() {
    hits_.clear();
    if (OutOfTime(fmt::format("{} tokens", tokens_))) return absl::OkStatus();
    std::map<std::string, std::vector<double>> times;
    std::map<std::string, Result> results;
    const bool warm = tokens_ == flags_.lengths.front();
    if (warm) SPLICE_RETURN_IF_ERROR(RunPrompt("exact").status());
    {
      SPLICE_ASSIGN_OR_RETURN(Result source, RunPrompt("exact"));
      MakeHits(*std::exchange(source.kv, nullptr));
      times["exact"] = {source.seconds};
      results["exact"] = std::move(source);
    }
    if (warm) {
      for (const std::string& method : flags_.methods) SPLICE_RETURN_IF_ERROR(RunPrompt(method).status());
    }
    for (int32_t i = 0; i < flags_.repeats; ++i) {
      for (const std::string& method : flags_.methods) {
        if (method == "exact" && i == 0) continue;
        if (times.contains(method) && Seconds(start_) > flags_.max_seconds) continue;
        if (OutOfTime(fmt::format("{} of {} tokens", method, tokens_))) continue;
        SPLICE_ASSIGN_OR_RETURN(Result result, RunPrompt(method));
        result.kv.reset();
        times[method].push_back(result.seconds);
        results[method] = std::move(result);
      }
    }
    const double exact = Median(times["exact"]);
    for (const std::string& method : flags_.methods) {
      if (times.contains(method)) ReportMethod(method, Median(times[method]), exact, results[method]);
    }
    return absl::OkStatus();
  }

  void ReportMethod(const std::string& method, double seconds, double exact, const Result& result) {
    const Work& work = result.work;
    const double linear = work.linear() / (flags_.linear_tflops * 1e12);
    const double attention = work.all_attention() / (flags_.attention_tflops * 1e12);
    fmt::print(
        "{} tokens, {}: {:.1f} ms, {:.2f}x faster than exact; {} of {} reused tokens recomputed, {} heads restored, "
        "{:.1f} "
        "% of the rows through feed-forward; roofline {:.1f} ms ({:.1f} linear, {:.1f} attention), {:.1f} % of it "
        "reached\n",
        tokens_, method, 1e3 * seconds, exact / seconds, result.recomputed, engine::CountOf(Reused()), result.restored,
        100 * work.ffn_share, 1e3 * (linear + attention), 1e3 * linear, 1e3 * attention,
        100 * (linear + attention) / seconds);
    const engine::LineReport& lines = result.lines;
    if (lines.heads > 0)
      fmt::print("  lines: {} of {} heads fell back, {:.1f} % of the cells, {:.4f} covered, {:.4f} of held-out rows\n",
                 lines.dense_heads, lines.heads, 100 * lines.cell_share(), lines.covered_share(),
                 lines.held_out_share());
    nlohmann::json stages = nlohmann::json::array();
    for (const StageTime& stage : result.stages) {
      if (flags_.stages) fmt::print("  {:9.3f} ms  {}\n", 1e3 * stage.seconds, stage.what);
      stages.push_back({{"what", stage.what}, {"s", stage.seconds}});
    }
    std::fflush(stdout);
    out_["methods"].push_back({{"tokens", tokens_},
                               {"method", method},
                               {"s", seconds},
                               {"factor", exact / seconds},
                               {"recomputed", result.recomputed},
                               {"restored_heads", result.restored},
                               {"ffn_share", work.ffn_share},
                               {"flops",
                                {{"projections", work.projections},
                                 {"ffn", work.ffn * work.ffn_share},
                                 {"attention", work.attention},
                                 {"local_attention", work.local_attention},
                                 {"scores", work.scores}}},
                               {"roofline_s", linear + attention},
                               {"cells", lines.cell_share()},
                               {"dense_heads", lines.dense_heads},
                               {"held_out", lines.held_out_share()},
                               {"stages", stages}});
  }

  engine::PositionRanges Reused() const {
    engine::PositionRanges ranges;
    for (const engine::SegmentHit& hit : hits_) ranges.push_back({hit.target, hit.target + hit.num_tokens});
    return ranges;
  }

  absl::Status Align(double bandwidth) {
    engine::SequenceKv kv(*pool_, engine::KvShapeOf(model_->config()));
    SPLICE_RETURN_IF_ERROR(kv.Reserve(tokens_));
    const auto plans = engine::MakeAlignPlans(hits_, kv, {0, model_->config().num_layers}, model_->config());
    SPLICE_ASSIGN_OR_RETURN(const double seconds,
                            Time(*executor_, flags_.repeats, [&] { return executor_->AlignCopy(plans); }));
    int64_t tokens = 0;
    for (const kernels::AlignRun& run : plans[0].runs) tokens += run.num_tokens;
    const double bytes = 2.0 * static_cast<double>(tokens) * static_cast<double>(model_->page_bytes()) /
                         kernels::kPageTokens * plans[0].num_streams;
    Report("align_s", seconds,
           fmt::format("align copy of {} tokens: {:.3f} ms, {:.3f} TB/s, {:.1f} % of the copy rate", tokens,
                       1e3 * seconds, bytes / seconds / 1e12, 100 * bytes / seconds / bandwidth));
    return absl::OkStatus();
  }

  // 512 rows at the end of the prompt over all of it, one layer.
  absl::Status Scores() {
    const engine::ModelConfig& c = model_->config();
    const kernels::Backend& backend = model_->backend();
    engine::SequenceKv kv(*pool_, engine::KvShapeOf(c));
    SPLICE_RETURN_IF_ERROR(kv.Reserve(tokens_));
    const int32_t rows = std::min(512, tokens_ / 2);
    std::vector<int32_t> tokens(rows), positions(rows), probes(rows);
    std::iota(probes.begin(), probes.end(), 0);
    std::iota(positions.begin(), positions.end(), tokens_ - rows);
    const kernels::BatchSequence batch{0, rows, tokens_, kv.streams(), kv.id()};
    SPLICE_RETURN_IF_ERROR(executor_->context().session->Stage({tokens, positions, {&batch, 1}}));
    const kernels::DType act = backend.activation_dtype(c.dtype);
    const int64_t width = c.q_size();
    SPLICE_ASSIGN_OR_RETURN(const auto q, backend.Allocate(rows * width * kernels::DTypeBytes(act)));
    SPLICE_RETURN_IF_ERROR(
        backend.FillRandom(executor_->context(),
                           {.out = q->data(), .dtype = act, .count = rows * width, .stream = 3, .step_exponent = -2}));
    SPLICE_ASSIGN_OR_RETURN(const auto lse, backend.Allocate(sizeof(float) * rows * c.num_qo_heads));
    SPLICE_ASSIGN_OR_RETURN(const auto scores, executor_->TakeScores(tokens_));
    std::vector<kernels::HeadStreamView> heads;
    for (int32_t h = 0; h < c.num_kv_heads; ++h) heads.push_back({kv.stream(0, h), tokens_, {}});
    const kernels::PositionRange all{0, tokens_};
    const kernels::ColumnScoresArgs args{.shape = {c.num_qo_heads, c.num_kv_heads, c.head_dim, 0.088f},
                                         .pool = view_,
                                         .q = {q->data(), act},
                                         .q_row_stride = width,
                                         .lse = static_cast<const float*>(lse->data()),
                                         .rows = {0, rows, positions, heads},
                                         .probes = probes,
                                         .columns = {&all, 1},
                                         .scores = static_cast<float*>(scores[0]->data())};
    SPLICE_ASSIGN_OR_RETURN(const double seconds, Time(*executor_, flags_.repeats, [&] {
                              return backend.ColumnScores(executor_->context(), args);
                            }));
    const double flops = 2.0 * rows * static_cast<double>(tokens_) * width;
    const double floor = flops / (flags_.attention_tflops * 1e12);
    Report("column_scores_s", seconds,
           fmt::format("column scores of {} rows over {}: {:.3f} ms, {:.0f} TFLOP/s, {:.0f} % of {:.0f} TFLOP/s", rows,
                       tokens_, 1e3 * seconds, flops / seconds / 1e12, 100 * floor / seconds, flags_.attention_tflops));
    return absl::OkStatus();
  }

  absl::Status Top() {
    const kernels::Backend& backend = model_->backend();
    SPLICE_ASSIGN_OR_RETURN(const auto scores, executor_->TakeScores(tokens_));
    SPLICE_RETURN_IF_ERROR(backend.FillRandom(
        executor_->context(),
        {.out = scores[0]->data(), .dtype = kernels::DType::kF32, .count = tokens_, .stream = 4, .step_exponent = -6}));
    const int64_t k = std::min<int64_t>(2048, tokens_ / 2);
    SPLICE_ASSIGN_OR_RETURN(const auto out, backend.Allocate(sizeof(int32_t) * static_cast<size_t>(k)));
    SPLICE_ASSIGN_OR_RETURN(const double seconds, Time(
                                                      *executor_, flags_.repeats,
                                                      [&] {
                                                        return backend.TopK(
                                                            executor_->context(),
                                                            {static_cast<const float*>(scores[0]->data()), tokens_, k,
                                                             static_cast<int32_t*>(out->data())});
                                                      },
                                                      100));
    Report("top_k_s", seconds, fmt::format("top {} of {}: {:.1f} us", k, tokens_, 1e6 * seconds));
    return absl::OkStatus();
  }

  const Flags& flags_;
  const Clock::time_point start_ = Clock::now();
  int32_t tokens_ = 0;  // of the prompt at hand
  std::shared_ptr<const engine::Model> model_;
  std::unique_ptr<kernels::Buffer> memory_;
  kernels::KvPoolView view_;
  std::unique_ptr<engine::PagePool> pool_;
  std::unique_ptr<engine::ParallelExecutor> executor_;
  std::vector<int32_t> prompt_;
  std::vector<engine::SegmentHit> hits_;
  nlohmann::json out_ = nlohmann::json::object();
};

}  // namespace
}  // namespace spl

int main(int argc, char** argv) {
  spl::Flags flags;
  CLI::App app(
      "Segment reuse at a real model's shape.\n\nExample:\n  splice_segment_bench --shape llama-3.1-8b --tokens 32768\n"
      "  splice_segment_bench --head-classes safe --methods exact,sparsex,redknot,splice --tokens 8192,32768,65536\n"
      "  splice_segment_bench --backend cpu --model models/splice-tiny --tokens 8192 --slice 512 --dense-layers 2");
  app.add_option("--shape", flags.shape, "random weights of this shape")->capture_default_str();
  app.add_option("--model", flags.model_dir, "a model folder instead");
  app.add_option("--backend", flags.backend, "cpu, cuda, cuda:N")->capture_default_str();
  app.add_option("--kv-dtype", flags.kv_dtype, "K and V in auto, f32, bf16 or fp8")->capture_default_str();
  app.add_option("--tokens", flags.lengths, "prompt lengths")->delimiter(',')->capture_default_str();
  app.add_option("--methods", flags.methods,
                 "policies; cold: sparsex without a hit; sparsex-dense, sparsex-probe=LAYERS, loopserve=ALPHA, "
                 "minference=SLASHES, "
                 "samkv=BUDGET (samkv-attention, samkv-means: by these)")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--head-classes", flags.head_classes, "a head_classes.json; with --shape also a preset")
      ->capture_default_str();
  app.add_option("--segments", flags.segments, "reused segments, of equal length")->capture_default_str();
  app.add_option("--reuse", flags.reuse, "share of the prompt in them")->capture_default_str();
  app.add_option("--slice", flags.slice, "rows of one pass")->capture_default_str();
  app.add_option("--dense-layers", flags.dense_layers, "-1: the policy's own")->capture_default_str();
  app.add_option("--probe-layers", flags.probe_layers, "of sparsex-probe without a number; -1: all")
      ->capture_default_str();
  app.add_option("--probe-tokens", flags.probe_tokens, "last fresh tokens that are the probe; 0: all of them")
      ->capture_default_str();
  app.add_option("--score-layers", flags.score_layers, "of sparsex-probe; -1: half")->capture_default_str();
  app.add_option("--recompute-share", flags.recompute_share)->capture_default_str();
  app.add_option("--repeats", flags.repeats)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--max-seconds", flags.max_seconds, "no run starts after so long")->capture_default_str();
  app.add_option("--linear-tflops", flags.linear_tflops, "rate of linear operations in the roofline")
      ->capture_default_str();
  app.add_option("--attention-tflops", flags.attention_tflops, "rate of attention and of column scores")
      ->capture_default_str();
  app.add_flag("--skip-kernels", flags.skip_kernels, "first tokens only");
  app.add_flag("--stages", flags.stages, "print the passes of each method");
  app.add_flag("--json", flags.json, "print JSON at the end");
  CLI11_PARSE(app, argc, argv);
  if (const absl::Status status = spl::Bench(flags).Run(); !status.ok()) {
    fmt::print(stderr, "splice_segment_bench: {}\n", spl::MessageOf(status));
    return 1;
  }
  return 0;
}
