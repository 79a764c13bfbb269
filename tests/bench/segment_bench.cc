// Segment reuse on a model of a real shape: time to the first token with most of the prompt cached elsewhere, against
// computing it, in one run; and its kernels against what their bytes and operations cost.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <numeric>

#include "services/base/status.h"
#include "services/engine/engine.h"
#include "services/engine/model/random_weights.h"
#include "services/engine/runtime/prompt_run.h"
#include "services/worker_flags/worker_flags.h"

namespace spl {
namespace {

using Clock = std::chrono::steady_clock;

struct Flags {
  std::string shape = "llama-3.1-8b";
  std::string model_dir;
  std::string backend = "cuda";
  int32_t tokens = 32768;
  int32_t segments = 16;
  double reuse = 0.9;
  int32_t slice = 4096;
  int32_t dense_layers = 3;
  double recompute_share = 0.05;
  int32_t repeats = 5;
  double gemm_tflops = 590;
  bool json = false;
};

double Seconds(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Median seconds of `work` on the session's queue, repeated so that starting it costs nothing beside it.
template <typename Work>
absl::StatusOr<double> Time(engine::ParallelExecutor& executor, int32_t repeats, const Work& work) {
  constexpr int kBatch = 10;
  std::vector<double> times;
  for (int32_t i = 0; i <= repeats; ++i) {
    SPLICE_RETURN_IF_ERROR(executor.context().session->Synchronize());
    const auto start = Clock::now();
    for (int j = 0; j < kBatch; ++j) SPLICE_RETURN_IF_ERROR(work());
    SPLICE_RETURN_IF_ERROR(executor.context().session->Synchronize());
    if (i > 0) times.push_back(Seconds(start) / kBatch);
  }
  return Median(times);
}

class Bench {
 public:
  explicit Bench(const Flags& flags) : flags_(flags) {}

  absl::Status Run() {
    SPLICE_RETURN_IF_ERROR(Load());
    SPLICE_ASSIGN_OR_RETURN(const double bandwidth, CopyRate());
    Report("copy_bytes_per_s", bandwidth, fmt::format("device copy {:.3f} TB/s (read plus write)", bandwidth / 1e12));
    SPLICE_RETURN_IF_ERROR(MakeSource());
    SPLICE_RETURN_IF_ERROR(FirstTokens());
    SPLICE_RETURN_IF_ERROR(Align(bandwidth));
    SPLICE_RETURN_IF_ERROR(Scores());
    SPLICE_RETURN_IF_ERROR(Top());
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
    SPLICE_ASSIGN_OR_RETURN(std::shared_ptr<const kernels::Backend> backend, MakeBackend(flags_.backend));
    if (flags_.model_dir.empty()) {
      SPLICE_ASSIGN_OR_RETURN(const engine::RandomModel random, engine::ParseRandomModel(flags_.shape));
      SPLICE_ASSIGN_OR_RETURN(model_, engine::Model::LoadRandom(random, backend));
    } else {
      SPLICE_ASSIGN_OR_RETURN(model_, engine::Model::Load(flags_.model_dir, backend));
    }
    const engine::ModelConfig& c = model_->config();
    fmt::print("{}\nmodel {}, {} tokens, {:.0f} % of them in {} segments\n", backend->description(), c.name,
               flags_.tokens, 100 * flags_.reuse, flags_.segments);
    const int64_t pages = engine::PagesForTokens(c, 2ll * flags_.tokens + 4 * kernels::kPageTokens);
    SPLICE_ASSIGN_OR_RETURN(memory_, backend->Allocate(pages * model_->page_bytes()));
    view_ = {static_cast<std::byte*>(memory_->data()), model_->kv_dtype(), c.head_dim, static_cast<int32_t>(pages)};
    pool_ = std::make_unique<engine::PagePool>(view_, backend.get());
    SPLICE_ASSIGN_OR_RETURN(executor_, engine::ParallelExecutor::Create(model_, view_, {.max_rows = flags_.slice}));
    for (int32_t i = 0; i < flags_.tokens; ++i) prompt_.push_back(static_cast<int32_t>((i * 7919ll) % c.vocab_size));
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

  absl::StatusOr<double> RunPrompt(const engine::ReuseOptions& reuse, const std::vector<engine::SegmentHit>& hits,
                                   std::shared_ptr<engine::SequenceKv>* keep, int64_t* recomputed) {
    auto kv = std::make_shared<engine::SequenceKv>(*pool_, engine::KvShapeOf(model_->config()));
    SPLICE_RETURN_IF_ERROR(kv->Reserve(flags_.tokens));
    SPLICE_ASSIGN_OR_RETURN(const auto policy, engine::MakeRecoveryPolicy(reuse, model_->config()));
    const auto start = Clock::now();
    engine::PromptRun run(prompt_, hits, *kv, *policy);
    SPLICE_RETURN_IF_ERROR(run.Begin(*executor_));
    int32_t last = 0;
    while (!run.done()) {
      const engine::PrefillSlice slice = run.Next(flags_.slice);
      last = static_cast<int32_t>(slice.tokens.size()) - 1;
      SPLICE_RETURN_IF_ERROR(executor_->Prefill({&slice, 1}, run.layers()));
      SPLICE_RETURN_IF_ERROR(run.Finish(*executor_));
    }
    SPLICE_RETURN_IF_ERROR(executor_->ComputeLogits({&last, 1}));
    SPLICE_RETURN_IF_ERROR(executor_->Argmax().status());
    const double seconds = Seconds(start);
    if (keep != nullptr) *keep = kv;
    if (recomputed != nullptr) *recomputed = run.recomputed_tokens();
    return seconds;
  }

  // The prompt's segments, computed once in another order, so that each must turn.
  absl::Status MakeSource() {
    std::shared_ptr<engine::SequenceKv> kv;
    SPLICE_RETURN_IF_ERROR(RunPrompt({.policy = "exact"}, {}, &kv, nullptr).status());
    const auto reused = static_cast<int32_t>(flags_.reuse * flags_.tokens), each = reused / flags_.segments;
    const int32_t fresh = flags_.tokens - each * flags_.segments;
    // Fresh text in front and behind; a segment comes from a place shifted by a few tokens.
    const int32_t begin = fresh / 2, shift = std::min(begin, 37);
    for (int32_t i = 0; i < flags_.segments; ++i) {
      const int32_t target = begin + i * each;
      const int32_t source = target - shift;
      hits_.push_back({std::make_shared<engine::SegmentSource>(
                           *kv, source, std::span(prompt_).subspan(static_cast<size_t>(target), each), false),
                       0, target, each});
    }
    return absl::OkStatus();
  }

  absl::Status FirstTokens() {
    const engine::ReuseOptions sparsex{
        .policy = "sparsex", .dense_layers = flags_.dense_layers, .recompute_share = flags_.recompute_share};
    std::vector<double> exact, cold, reused;
    int64_t recomputed = 0;
    for (int32_t i = 0; i <= flags_.repeats; ++i) {
      SPLICE_ASSIGN_OR_RETURN(const double a, RunPrompt({.policy = "exact"}, {}, nullptr, nullptr));
      SPLICE_ASSIGN_OR_RETURN(const double b, RunPrompt(sparsex, {}, nullptr, nullptr));
      SPLICE_ASSIGN_OR_RETURN(const double c, RunPrompt(sparsex, hits_, nullptr, &recomputed));
      if (i == 0) continue;
      exact.push_back(a);
      cold.push_back(b);
      reused.push_back(c);
    }
    Report("exact_s", Median(exact), fmt::format("exact: {:.1f} ms", 1e3 * Median(exact)));
    Report("cold_s", Median(cold),
           fmt::format("sparsex without a hit: {:.1f} ms, {:.3f} of exact", 1e3 * Median(cold),
                       Median(cold) / Median(exact)));
    out_["recomputed"] = recomputed;
    Report("sparsex_s", Median(reused),
           fmt::format("sparsex, {} dense layers, {} of {} reused tokens recomputed: {:.1f} ms, {:.2f}x faster",
                       flags_.dense_layers, recomputed, engine::CountOf(Reused()), 1e3 * Median(reused),
                       Median(exact) / Median(reused)));
    return absl::OkStatus();
  }

  engine::PositionRanges Reused() const {
    engine::PositionRanges ranges;
    for (const engine::SegmentHit& hit : hits_) ranges.push_back({hit.target, hit.target + hit.num_tokens});
    return ranges;
  }

  absl::Status Align(double bandwidth) {
    engine::SequenceKv kv(*pool_, engine::KvShapeOf(model_->config()));
    SPLICE_RETURN_IF_ERROR(kv.Reserve(flags_.tokens));
    const auto plans = engine::MakeAlignPlans(hits_, kv, 0, model_->config());
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
    SPLICE_RETURN_IF_ERROR(kv.Reserve(flags_.tokens));
    const int32_t rows = std::min(512, flags_.tokens / 2);
    std::vector<int32_t> tokens(rows), positions(rows), probes(rows);
    std::iota(probes.begin(), probes.end(), 0);
    std::iota(positions.begin(), positions.end(), flags_.tokens - rows);
    const kernels::BatchSequence batch{0, rows, flags_.tokens, kv.streams(), kv.id()};
    SPLICE_RETURN_IF_ERROR(executor_->context().session->Stage({tokens, positions, {&batch, 1}}));
    const kernels::DType act = backend.activation_dtype(c.dtype);
    const int64_t width = c.q_size();
    SPLICE_ASSIGN_OR_RETURN(const auto q, backend.Allocate(rows * width * kernels::DTypeBytes(act)));
    SPLICE_RETURN_IF_ERROR(
        backend.FillRandom(executor_->context(),
                           {.out = q->data(), .dtype = act, .count = rows * width, .stream = 3, .step_exponent = -2}));
    SPLICE_ASSIGN_OR_RETURN(const auto lse, backend.Allocate(sizeof(float) * rows * c.num_qo_heads));
    SPLICE_ASSIGN_OR_RETURN(const auto scores, executor_->AllocateScores(flags_.tokens));
    std::vector<kernels::HeadStreamView> heads;
    for (int32_t h = 0; h < c.num_kv_heads; ++h) heads.push_back({kv.stream(0, h), flags_.tokens, {}});
    const kernels::PositionRange all{0, flags_.tokens};
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
    const double flops = 2.0 * rows * static_cast<double>(flags_.tokens) * width;
    const double floor = flops / (flags_.gemm_tflops * 1e12);
    Report(
        "column_scores_s", seconds,
        fmt::format("column scores of {} rows over {}: {:.3f} ms, {:.0f} TFLOP/s, {:.0f} % of {:.0f} TFLOP/s", rows,
                    flags_.tokens, 1e3 * seconds, flops / seconds / 1e12, 100 * floor / seconds, flags_.gemm_tflops));
    return absl::OkStatus();
  }

  absl::Status Top() {
    const kernels::Backend& backend = model_->backend();
    SPLICE_ASSIGN_OR_RETURN(const auto scores, executor_->AllocateScores(flags_.tokens));
    SPLICE_RETURN_IF_ERROR(backend.FillRandom(executor_->context(), {.out = scores[0]->data(),
                                                                     .dtype = kernels::DType::kF32,
                                                                     .count = flags_.tokens,
                                                                     .stream = 4,
                                                                     .step_exponent = -6}));
    const int64_t k = std::min<int64_t>(2048, flags_.tokens / 2);
    SPLICE_ASSIGN_OR_RETURN(const auto out, backend.Allocate(sizeof(int32_t) * static_cast<size_t>(k)));
    SPLICE_ASSIGN_OR_RETURN(const double seconds, Time(*executor_, flags_.repeats, [&] {
                              return backend.TopK(executor_->context(),
                                                  {static_cast<const float*>(scores[0]->data()), flags_.tokens, k,
                                                   static_cast<int32_t*>(out->data())});
                            }));
    Report("top_k_s", seconds, fmt::format("top {} of {}: {:.1f} us", k, flags_.tokens, 1e6 * seconds));
    return absl::OkStatus();
  }

  const Flags& flags_;
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
      "  splice_segment_bench --backend cpu --model models/splice-tiny --tokens 8192 --slice 512 --dense-layers 2");
  app.add_option("--shape", flags.shape, "random weights of this shape")->capture_default_str();
  app.add_option("--model", flags.model_dir, "a model folder instead");
  app.add_option("--backend", flags.backend, "cpu, cuda, cuda:N")->capture_default_str();
  app.add_option("--tokens", flags.tokens, "prompt length")->capture_default_str();
  app.add_option("--segments", flags.segments, "reused segments, of equal length")->capture_default_str();
  app.add_option("--reuse", flags.reuse, "share of the prompt in them")->capture_default_str();
  app.add_option("--slice", flags.slice, "rows of one pass")->capture_default_str();
  app.add_option("--dense-layers", flags.dense_layers)->capture_default_str();
  app.add_option("--recompute-share", flags.recompute_share)->capture_default_str();
  app.add_option("--repeats", flags.repeats)->capture_default_str();
  app.add_option("--gemm-tflops", flags.gemm_tflops, "rate that column scores are compared with")
      ->capture_default_str();
  app.add_flag("--json", flags.json, "print JSON at the end");
  CLI11_PARSE(app, argc, argv);
  if (const absl::Status status = spl::Bench(flags).Run(); !status.ok()) {
    fmt::print(stderr, "splice_segment_bench: {}\n", spl::MessageOf(status));
    return 1;
  }
  return 0;
}
