// What one engine does with a model of a real shape: time of a prompt, and of one decode step, against what the bytes
// and operations cost at the rates of the device.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>

#include "absl/strings/numbers.h"
#include "services/base/status.h"
#include "services/engine/engine.h"
#include "services/engine/methods/selection_methods.h"
#include "services/engine/model/random_weights.h"
#include "services/engine/recovery/exact.h"
#include "services/engine/runtime/measure_step_costs.h"
#include "services/engine/selection/adaptive.h"
#include "services/engine/selection/dense.h"
#include "services/engine/selection/kept_tokens_selector.h"
#include "services/engine/selection/step_modes.h"
#include "services/worker_flags/worker_flags.h"
#include "tests/bench/median.h"

namespace spl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kKept = "kept=";  // the share of the context's pages that samkv would have kept, and :METHOD
constexpr char kEstimating[] = "sparcas+mass";

// That share of the pages, evenly over the context, and its end.
std::shared_ptr<const engine::KeptTokens> KeepPages(int32_t num_tokens, double share, int32_t num_layers) {
  engine::PositionRanges ranges;
  for (int32_t begin = 0, page = 0; begin < num_tokens; begin += kernels::kPageTokens, ++page) {
    const engine::PositionRange range{begin, std::min(begin + kernels::kPageTokens, num_tokens)};
    if (page == 0 || range.end == num_tokens || std::floor((page + 1) * share) > std::floor(page * share))
      ranges.push_back(range);
  }
  return std::make_shared<engine::KeptTokens>(engine::KeptTokens{
      num_tokens, std::vector<engine::PositionRanges>(static_cast<size_t>(num_layers), engine::MergeRanges(ranges))});
}

// One entry of --selectors: a method, sparcas16 (sparcas with keys of 16 bits), sparcas+mass (sparcas whose steps also
// estimate the kept mass, and read it back), or kept=SHARE[:METHOD], which decodes what is kept with that method.
absl::StatusOr<std::unique_ptr<engine::TokenSelector>> MakeSelector(const std::string& entry, int32_t context,
                                                                    int32_t budget, const engine::Model& model) {
  const engine::ModelConfig& config = model.config();
  const bool keeps = entry.starts_with(kKept);
  const size_t colon = keeps ? entry.find(':') : std::string::npos;
  const std::string method = !keeps ? entry : colon == std::string::npos ? "dense" : entry.substr(colon + 1);
  const bool wide_keys = method == "sparcas16";
  engine::DecodeOptions options(wide_keys || method == kEstimating ? "sparcas" : method);
  if (wide_keys || keeps) options.dims = engine::kCompactDims;
  if (method != "dense") options.budget = budget;
  SPLICE_ASSIGN_OR_RETURN(auto selector, engine::MakeTokenSelector(engine::WithKeys(options, model), config, nullptr));
  if (selector->of_prompt() != nullptr)
    return absl::InvalidArgumentError("--selectors: " + method + " chooses by a prompt, and there is none here");
  if (!keeps) return selector;
  double share = 0;
  if (!absl::SimpleAtod(entry.substr(std::strlen(kKept), colon - std::strlen(kKept)), &share) || share < 0 || share > 1)
    return absl::InvalidArgumentError("--selectors: '" + entry + "' is not kept=SHARE or kept=SHARE:METHOD");
  if (method == "dense") selector.reset();
  return std::make_unique<engine::KeptTokensSelector>(config, KeepPages(context, share, config.num_layers),
                                                      std::move(selector));
}

struct Flags {
  std::string shape = "llama-3.1-8b";
  std::string backend = "cuda";
  std::string quantize = "none";
  std::string kv_dtype = "auto";
  bool fp8_activations = true;
  int32_t tp = 1;
  std::vector<int32_t> prefill = {2048, 8192, 32768};
  std::vector<int32_t> decode = {1, 8, 32};
  int32_t context = 8192;
  std::vector<std::string> selectors = {"dense"};
  int32_t budget = 2048;
  int32_t kv_exponent = -6;  // of two: the size of K and V
  int32_t slice = 4096;
  int32_t repeats = 3;
  int32_t steps = 32;
  double gemm_tflops = 680, attention_tflops = 590;
  bool json = false;
};

double Seconds(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Read plus write rate of a large copy on the device.
absl::StatusOr<double> CopyRate(const kernels::Backend& backend) {
  constexpr size_t kBytes = size_t{1} << 31;
  SPLICE_ASSIGN_OR_RETURN(const auto from, backend.Allocate(kBytes));
  SPLICE_ASSIGN_OR_RETURN(const auto to, backend.Allocate(kBytes));
  std::vector<kernels::CopyOp> ops(8, {to->data(), from->data(), kBytes});
  SPLICE_RETURN_IF_ERROR(backend.Copy(kernels::CopyKind::kWithin, ops));
  double best = 0;
  for (int i = 0; i < 3; ++i) {
    const auto start = Clock::now();
    SPLICE_RETURN_IF_ERROR(backend.Copy(kernels::CopyKind::kWithin, ops));
    best = std::max(best, 2.0 * kBytes * static_cast<double>(ops.size()) / Seconds(start));
  }
  return best;
}

// Weights of the layers, with `experts` experts of those that have some.
int64_t LinearWeights(const engine::ModelConfig& c, double experts) {
  const auto ffn = c.moe.num_experts > 0 ? static_cast<int64_t>(experts * static_cast<double>(c.moe.intermediate_size))
                                         : int64_t{c.intermediate_size};
  return c.num_layers * (int64_t{c.hidden_size} * (2 * c.q_size() + 2 * c.kv_size()) + 3 * ffn * c.hidden_size);
}
// Experts that some row of a step goes to, where routers choose at random.
double ExpertsOfStep(const engine::ModelConfig& c, int32_t rows) {
  if (c.moe.num_experts == 0) return 0;
  const double all = c.moe.num_experts;
  return all * (1 - std::pow(1 - c.moe.num_experts_per_token / all, rows));
}

// Decides as a decode engine does before each of its steps; returns how many sequences choose.
int32_t DecideModes(const engine::StepCosts& costs, int64_t steps_left,
                    const std::vector<std::unique_ptr<engine::SequenceKv>>& sequences,
                    const std::vector<std::unique_ptr<engine::TokenSelector>>& selectors) {
  std::vector<engine::StepCandidate> candidates;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const engine::AdaptiveSelector& selector = *selectors[i]->adaptive();
    const int64_t positions = sequences[i]->num_tokens() + 1;
    candidates.push_back({.positions = positions,
                          .steps_left = steps_left,
                          .may_choose = selector.may_choose(positions),
                          .chooses = selector.chooses(),
                          .rested = selector.rested(positions)});
  }
  std::vector<bool> choose(candidates.size());
  engine::DecideModes(costs, candidates, {}, choose);
  for (size_t i = 0; i < candidates.size(); ++i) selectors[i]->adaptive()->Decide(choose[i], candidates[i].positions);
  return static_cast<int32_t>(std::count(choose.begin(), choose.end(), true));
}

// The costs that `adaptive` decides by, in milliseconds.
absl::StatusOr<engine::StepCosts> MeasureCosts(engine::ParallelExecutor& executor, engine::PagePool& pool) {
  const auto start = Clock::now();
  SPLICE_ASSIGN_OR_RETURN(engine::StepCosts costs,
                          engine::MeasureStepCosts(executor, pool, std::chrono::milliseconds(2000)));
  fmt::print("step costs, measured in {:.2f} s\n", Seconds(start));
  for (const engine::StepCosts::Row& row : costs.rows()) {
    for (const engine::StepCosts::Point& point : row.points)
      fmt::print("  {:>3} x {:>6}: dense {:7.3f}, chosen {:7.3f}, to begin {:7.3f}\n", point.sequences, row.length,
                 point.dense_s * 1e3, point.chosen_s * 1e3, point.change_s * 1e3);
  }
  return costs;
}

absl::Status RunBench(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const engine::Devices devices, MakeDevices(flags.backend, flags.tp));
  const kernels::Backend* const backend = devices[0].get();
  SPLICE_ASSIGN_OR_RETURN(const engine::RandomModel random, engine::ParseRandomModel(flags.shape));
  SPLICE_ASSIGN_OR_RETURN(const auto kv_dtype, KvTypeFromName(flags.kv_dtype));
  const auto load_start = Clock::now();
  SPLICE_ASSIGN_OR_RETURN(const auto model,
                          engine::Model::LoadRandom(random, devices,
                                                    {.kv_dtype = kv_dtype,
                                                     .quantize = engine::QuantizeToFromName(flags.quantize),
                                                     .quantize_activations = flags.fp8_activations}));
  const engine::ModelConfig& c = model->config();
  const size_t element = kernels::DTypeBytes(backend->activation_dtype(c.dtype));
  const kernels::DType layer_dtype =
      kernels::IsQuantizedType(model->weight_dtype()) ? model->weight_dtype() : backend->activation_dtype(c.dtype);
  fmt::print("{}, {} ranks\nmodel {}: {} layers in {}, made in {:.1f} s\n", backend->description(), flags.tp, c.name,
             c.num_layers, kernels::DTypeName(model->weight_dtype()), Seconds(load_start));
  SPLICE_ASSIGN_OR_RETURN(const double bandwidth, CopyRate(*backend));
  fmt::print("device copy {:.2f} TB/s (read plus write)\n", bandwidth / 1e12);
  std::fflush(stdout);

  const int32_t longest = flags.prefill.empty() ? 0 : *std::max_element(flags.prefill.begin(), flags.prefill.end());
  const int32_t widest = flags.decode.empty() ? 0 : *std::max_element(flags.decode.begin(), flags.decode.end());
  const int64_t tokens = std::max<int64_t>(longest, int64_t{widest} * (flags.context + flags.steps + 64));
  // An eighth more: what selectors keep beside the KV.
  const int64_t pages = engine::PagesForTokens(c, tokens + tokens / 8 + 2 * kernels::kPageTokens * std::max(1, widest));
  SPLICE_ASSIGN_OR_RETURN(const engine::KvMemory memory, engine::AllocateKvMemory(*model, pages));
  // Never on zeros: K and V of roughly the size that a model makes.
  SPLICE_RETURN_IF_ERROR(engine::FillWithNoise(*model, memory, flags.kv_exponent));
  const engine::KvPartitions& view = memory.pages;
  engine::PagePool pool(view, model->backends());
  nlohmann::json out = {{"backend", backend->description()},
                        {"ranks", flags.tp},
                        {"model", c.name},
                        {"weights", kernels::DTypeName(model->weight_dtype())},
                        {"kv", kernels::DTypeName(model->kv_dtype())},
                        {"copy_bytes_per_s", bandwidth}};

  {
    SPLICE_ASSIGN_OR_RETURN(const auto executor, engine::ParallelExecutor::Create(
                                                     model, view, {.max_rows = flags.slice, .max_sequences = 1}));
    for (const int32_t length : flags.prefill) {
      std::vector<int32_t> prompt(length);
      for (int32_t i = 0; i < length; ++i) prompt[i] = static_cast<int32_t>((i * 7919ll) % c.vocab_size);
      std::vector<int32_t> positions(length);
      std::iota(positions.begin(), positions.end(), 0);
      std::vector<double> times;
      for (int repeat = 0; repeat <= flags.repeats; ++repeat) {
        engine::SequenceKv kv(pool, engine::KvShapeOf(c));
        SPLICE_RETURN_IF_ERROR(kv.Reserve(length));
        engine::ExactPolicy policy(c);
        const auto start = Clock::now();
        for (int32_t done = 0; done < length;) {
          const int32_t rows = std::min(flags.slice, length - done);
          const engine::PrefillSlice slice{std::span(prompt).subspan(done, rows),
                                           std::span(positions).subspan(done, rows), &kv, &policy};
          SPLICE_RETURN_IF_ERROR(executor->Prefill({&slice, 1}));
          done += rows;
          kv.set_num_tokens(done);
        }
        const int32_t last = (length - 1) % flags.slice;
        SPLICE_RETURN_IF_ERROR(executor->ComputeLogits({&last, 1}));
        SPLICE_RETURN_IF_ERROR(executor->Argmax().status());
        if (repeat > 0) times.push_back(Seconds(start));  // the first one warms up
      }
      const double linear = 2.0 * static_cast<double>(LinearWeights(c, c.moe.num_experts_per_token)) * length;
      const double attention = 2.0 * length * static_cast<double>(length) * c.q_size() * c.num_layers;
      const double floor =
          (linear / (flags.gemm_tflops * 1e12) + attention / (flags.attention_tflops * 1e12)) / flags.tp;
      const double time = Median(times);
      fmt::print("prefill {:>6} tokens: {:8.1f} ms, {:8.0f} tokens/s, floor {:8.1f} ms, {:.2f}x\n", length, time * 1e3,
                 length / time, floor * 1e3, time / floor);
      std::fflush(stdout);
      out["prefill"].push_back({{"tokens", length}, {"seconds", time}, {"floor_seconds", floor}});
    }
  }
  if (widest == 0) return absl::OkStatus();
  SPLICE_ASSIGN_OR_RETURN(const auto executor,
                          engine::ParallelExecutor::Create(model, view, {.max_rows = widest, .max_sequences = widest}));
  engine::StepCosts costs;
  if (std::find(flags.selectors.begin(), flags.selectors.end(), "adaptive") != flags.selectors.end()) {
    SPLICE_ASSIGN_OR_RETURN(costs, MeasureCosts(*executor, pool));
  }
  constexpr int32_t kRepeats = 5;
  const int32_t positions = flags.steps + 2 * kRepeats + 1;  // that the steps below write
  for (const int32_t batch : flags.decode)
    for (const std::string& name : flags.selectors) {
      // Pages that were lists or packed keys before are no K and V.
      SPLICE_RETURN_IF_ERROR(engine::FillWithNoise(*model, memory, flags.kv_exponent));
      std::vector<std::unique_ptr<engine::SequenceKv>> sequences;
      std::vector<std::unique_ptr<engine::TokenSelector>> selectors;
      std::vector<std::unique_ptr<engine::CompactPages>> compact;
      for (int32_t i = 0; i < batch; ++i) {
        sequences.push_back(std::make_unique<engine::SequenceKv>(pool, engine::KvShapeOf(c)));
        SPLICE_RETURN_IF_ERROR(sequences.back()->Reserve(flags.context + positions));
        sequences.back()->set_num_tokens(flags.context);
        SPLICE_ASSIGN_OR_RETURN(selectors.emplace_back(), MakeSelector(name, flags.context, flags.budget, *model));
        SPLICE_ASSIGN_OR_RETURN(compact.emplace_back(),
                                engine::MakeCompactPages(*selectors.back(), *model, pool, flags.context));
        if (compact.back() != nullptr) SPLICE_RETURN_IF_ERROR(compact.back()->Reserve(flags.context + positions));
        SPLICE_RETURN_IF_ERROR(
            engine::BeginLists(*model, pool, *selectors.back(), flags.context, compact.back().get()));
      }
      std::vector<int32_t> last(batch, 1);
      std::vector<double> on_host;  // until the device has all of the step
      const auto run_step = [&]() -> absl::StatusOr<double> {
        const auto start = Clock::now();
        std::vector<engine::DecodeRow> rows;
        for (int32_t i = 0; i < batch; ++i)
          rows.push_back({.token = last[i],
                          .kv = sequences[i].get(),
                          .selector = selectors[i].get(),
                          .compact = compact[i].get(),
                          .estimates = name == kEstimating});
        SPLICE_RETURN_IF_ERROR(executor->Decode(rows));
        on_host.push_back(Seconds(start));
        SPLICE_ASSIGN_OR_RETURN(engine::PendingMass mass, executor->BeginMass());
        SPLICE_ASSIGN_OR_RETURN(const auto best, executor->Argmax());
        SPLICE_RETURN_IF_ERROR(mass.Wait().status());
        last.assign(best.begin(), best.end());
        for (auto& kv : sequences) kv->set_num_tokens(kv->num_tokens() + 1);
        return Seconds(start);
      };
      std::vector<double> times;
      double sum = 0;
      int64_t chosen = 0;
      const bool adapts = selectors[0]->adaptive() != nullptr;
      for (int32_t step = 0; step < flags.steps; ++step) {
        if (adapts) chosen += DecideModes(costs, flags.steps - step, sequences, selectors);
        SPLICE_ASSIGN_OR_RETURN(const double seconds, run_step());
        sum += seconds;
        if (step >= 4) times.push_back(seconds);
      }
      // The step in which sequences choose for the first time, and gather what they choose by: one of them, and all.
      std::vector<double> joins;
      for (const int32_t joining : {1, batch}) {
        if (adapts || selectors[0]->scoring().scoring == engine::TokenScoring::kNone) break;
        std::vector<double> of_joining;
        for (int repeat = 0; repeat < kRepeats; ++repeat) {
          for (int32_t i = 0; i < joining; ++i) {
            SPLICE_ASSIGN_OR_RETURN(selectors[i], MakeSelector(name, flags.context, flags.budget, *model));
          }
          SPLICE_ASSIGN_OR_RETURN(of_joining.emplace_back(), run_step());
        }
        joins.push_back(Median(of_joining));
      }
      const double weights =
          static_cast<double>(kernels::DTypeRowBytes(layer_dtype, LinearWeights(c, ExpertsOfStep(c, batch)))) +
          static_cast<double>(int64_t{c.vocab_size} * c.hidden_size) * static_cast<double>(element);
      const double kv_bytes = 2.0 * batch * flags.context * c.num_layers * c.kv_size() *
                              static_cast<double>(model->page_bytes()) / (2 * kernels::kPageTokens * c.head_dim);
      const double floor = (weights + kv_bytes) / bandwidth / flags.tp;
      const double time = Median(times);
      on_host.resize(static_cast<size_t>(flags.steps));
      const double launched = Median(on_host);
      const double longest_late =
          *std::max_element(times.begin() + static_cast<int64_t>(times.size() / 2), times.end());
      // Others on the machine make a step slower, never faster.
      const double fastest = *std::min_element(times.begin(), times.end());
      fmt::print(
          "decode  B={:<3} at {}, {}: {:8.3f} ms a step, fastest {:8.3f} ms, mean of all {:8.3f} ms, longest of the "
          "second "
          "half {:8.3f} ms, {:8.3f} ms until it is launched, {:8.0f} tokens/s, floor of dense {:8.3f} ms, {:.2f}x\n",
          batch, flags.context, name, time * 1e3, fastest * 1e3, sum / flags.steps * 1e3, longest_late * 1e3,
          launched * 1e3, batch / time, floor * 1e3, time / floor);
      if (adapts) fmt::print("        {} of {} rows chose\n", chosen, int64_t{flags.steps} * batch);
      if (!joins.empty())
        fmt::print("        a step in which one of them chooses first: {:.3f} ms, all of them: {:.3f} ms\n",
                   joins[0] * 1e3, joins[1] * 1e3);
      std::fflush(stdout);
      out["decode"].push_back({{"batch", batch},
                               {"context", flags.context},
                               {"selector", name},
                               {"seconds", time},
                               {"fastest_seconds", fastest},
                               {"mean_seconds", sum / flags.steps},
                               {"launch_seconds", launched},
                               {"longest_of_second_half_seconds", longest_late},
                               {"chosen_rows", chosen},
                               {"first_choice_seconds", joins},
                               {"floor_seconds", floor}});
    }
  if (flags.json) fmt::print("{}\n", out.dump());
  return absl::OkStatus();
}

}  // namespace
}  // namespace spl

int main(int argc, char** argv) {
  spl::Flags flags;
  CLI::App app("Times prompts and decode steps of a model of a real shape with random weights, in process.");
  app.add_option("--random-weights", flags.shape, "SHAPE or config.json, with :SEED")->capture_default_str();
  app.add_option("--backend", flags.backend, "cpu, cuda or cuda:GPU")->capture_default_str();
  app.add_flag("!--no-fp8-activations", flags.fp8_activations, "FP8 weights are multiplied with bf16");
  app.add_option("--quantize", flags.quantize, "fp8, int4: the layers' matrices in that type; none")
      ->check(CLI::IsMember({"none", "fp8", "int4"}))
      ->capture_default_str();
  app.add_option("--kv-dtype", flags.kv_dtype, "K and V in auto, f32, bf16 or fp8")->capture_default_str();
  app.add_option("--tp", flags.tp, "ranks, on GPUs from the first on; floors are divided by it")
      ->check(CLI::IsMember({1, 2, 4, 8}))
      ->capture_default_str();
  app.add_option("--prefill", flags.prefill, "prompt lengths")->delimiter(',')->capture_default_str();
  app.add_option("--decode", flags.decode, "batch sizes; 0: none")->delimiter(',')->capture_default_str();
  app.add_option("--selectors", flags.selectors,
                 "decode methods, adaptive by costs that are measured before; sparcas16: sparcas with keys of 16 bits; "
                 "sparcas+mass: its steps estimate the kept mass, too; "
                 "kept=SHARE, kept=SHARE:METHOD: behind "
                 "samkv, which kept that share of the context")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--budget", flags.budget, "tokens of those that choose")->capture_default_str();
  app.add_option("--kv-exponent", flags.kv_exponent,
                 "size of random K and V; near 0 a few keys have most of the weight")
      ->capture_default_str();
  app.add_option("--context", flags.context, "tokens of every decoding sequence")->capture_default_str();
  app.add_option("--slice-tokens", flags.slice, "tokens of one prefill slice")->capture_default_str();
  app.add_option("--repeats", flags.repeats)->capture_default_str();
  app.add_option("--steps", flags.steps, "decode steps")->capture_default_str();
  app.add_option("--gemm-tflops", flags.gemm_tflops, "rate of the floor's products")->capture_default_str();
  app.add_option("--attention-tflops", flags.attention_tflops, "rate of the floor's attention")->capture_default_str();
  app.add_flag("--json", flags.json);
  CLI11_PARSE(app, argc, argv);
  std::erase(flags.decode, 0);
  std::erase(flags.prefill, 0);
  const absl::Status status = spl::RunBench(flags);
  if (status.ok()) return 0;
  fmt::print(stderr, "splice_engine_bench: {}\n", spl::MessageOf(status));
  return 1;
}
