#include "tools/cli/capacity_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <numeric>

#include "services/base/status.h"
#include "services/engine/methods/selection_methods.h"

namespace spl::cli {
namespace {

using Clock = std::chrono::steady_clock;
using Classes = std::shared_ptr<const engine::StreamClasses>;

struct Sequence {
  std::unique_ptr<engine::SequenceKv> kv;
  std::unique_ptr<engine::TokenSelector> selector;
};

int64_t Sum(const std::vector<int64_t>& counts) { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

// [num_ranks]: most pages that a sequence has at any time from its prompt to the last step.
std::vector<int64_t> MostPages(const engine::KvShape& shape, const engine::StreamClasses* classes, int num_ranks,
                               int64_t first, int64_t last) {
  std::vector<int64_t> most(static_cast<size_t>(num_ranks));
  for (int64_t n = first; n <= last; ++n) {
    const auto pages = engine::PagesByRank(shape, classes, num_ranks, n);
    for (size_t r = 0; r < most.size(); ++r) most[r] = std::max(most[r], pages[r]);
  }
  return most;
}

// Decodes one more token with every sequence. ResourceExhausted: the pool is full.
absl::Status Step(engine::ParallelExecutor& executor, std::vector<Sequence>& sequences) {
  std::vector<engine::DecodeRow> rows;
  for (Sequence& sequence : sequences) {
    SPLICE_RETURN_IF_ERROR(sequence.kv->Reserve(sequence.kv->num_tokens() + 1));
    rows.push_back({1, sequence.kv.get(), sequence.selector.get()});
  }
  SPLICE_RETURN_IF_ERROR(executor.Decode(rows));
  SPLICE_RETURN_IF_ERROR(executor.Argmax().status());
  for (Sequence& sequence : sequences) sequence.kv->set_num_tokens(sequence.kv->num_tokens() + 1);
  return absl::OkStatus();
}

// Median duration of a step with `count` sequences.
absl::StatusOr<double> RunSteps(engine::ParallelExecutor& executor, engine::PagePool& pool, const Classes& classes,
                                int32_t count, const CapacityOptions& options) {
  const engine::ModelConfig& config = executor.model().config();
  std::vector<Sequence> sequences;
  for (int32_t i = 0; i < count; ++i) {
    Sequence& sequence = sequences.emplace_back();
    sequence.kv = std::make_unique<engine::SequenceKv>(pool, engine::KvShapeOf(config), classes);
    SPLICE_RETURN_IF_ERROR(sequence.kv->Reserve(options.context));
    sequence.kv->set_num_tokens(options.context);
    SPLICE_ASSIGN_OR_RETURN(sequence.selector, engine::MakeTokenSelector("", config, classes));
  }
  std::vector<double> times;
  for (int32_t step = 0; step <= options.steps; ++step) {
    const auto start = Clock::now();
    SPLICE_RETURN_IF_ERROR(Step(executor, sequences));
    if (step > 0) times.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

double PerSequence(const CapacityRow& row, size_t page_bytes) { return static_cast<double>(row.pages * page_bytes); }

}  // namespace

absl::StatusOr<CapacityRow> MeasureCapacity(const std::shared_ptr<const engine::Model>& model,
                                            const CapacityOptions& options, const std::string& name,
                                            const engine::HeadClassMap* map) {
  const engine::ModelConfig& config = model->config();
  const int64_t last = options.context + options.steps + 1;
  if (options.context < 1 || last > config.max_positions)
    return InvalidArgument("a context of {} tokens and {} steps: the model's context is {}", options.context,
                           options.steps + 1, config.max_positions);
  const engine::KvShape shape = engine::KvShapeOf(config);
  const Classes classes = map == nullptr ? nullptr : engine::ServedClasses(*map);
  CapacityRow row{.classes = name, .num_global = shape.num_streams(), .num_heads = shape.num_streams()};
  row.kept_tokens = options.context * shape.num_streams();
  if (classes != nullptr) {
    row.num_global = row.kept_tokens = 0;
    for (const engine::HeadClass& head : *classes) {
      row.num_global += head.is_global ? 1 : 0;
      row.kept_tokens += head.kept_tokens(options.context);
    }
  }

  SPLICE_ASSIGN_OR_RETURN(
      engine::KvMemory memory,
      engine::AllocateKvMemory(*model, static_cast<int64_t>(options.kv_bytes / model->page_bytes())));
  SPLICE_RETURN_IF_ERROR(engine::FillWithNoise(*model, memory));
  engine::PagePool pool(memory.pages, model->backends());

  const std::vector<int64_t> most = MostPages(shape, classes.get(), model->num_ranks(), options.context, last);
  row.pages = Sum(most);
  const int64_t fit = pool.view().pages_per_rank() / *std::max_element(most.begin(), most.end());
  row.at_limit = fit > options.max_sequences;
  row.sequences = static_cast<int32_t>(std::min<int64_t>(fit, options.max_sequences));
  if (row.sequences == 0)
    return Errorf(absl::StatusCode::kResourceExhausted,
                  "{}: a sequence of {} tokens takes {} pages, the pool has {}: give it more --kv-bytes", name,
                  options.context, row.pages, pool.num_pages());
  SPLICE_ASSIGN_OR_RETURN(const auto executor, engine::ParallelExecutor::Create(model, memory.pages,
                                                                                {.num_threads = options.num_threads,
                                                                                 .max_rows = row.sequences,
                                                                                 .max_sequences = row.sequences}));
  // A window gives its page back only after the step that takes a new one, so that the last sequence of the estimate
  // may not fit.
  absl::StatusOr<double> step = RunSteps(*executor, pool, classes, row.sequences, options);
  while (step.status().code() == absl::StatusCode::kResourceExhausted && row.sequences > 1)
    step = RunSteps(*executor, pool, classes, --row.sequences, options);
  SPLICE_RETURN_IF_ERROR(step.status());
  row.step_s = *step;
  return row;
}

std::string CapacityText(const std::vector<CapacityRow>& rows, const CapacityOptions& options, size_t page_bytes) {
  std::string text = fmt::format("context {} tokens, {:.2f} GiB of pages, {} steps with all sequences\n",
                                 options.context, static_cast<double>(options.kv_bytes) / (1 << 30), options.steps);
  text += fmt::format("{:<12} {:>13} {:>15} {:>9} {:>10} {:>7} {:>9} {:>9} {:>10}\n", "classes", "global heads",
                      "MiB a sequence", "smaller", "(formula)", "fit", "more", "ms a step", "tokens/s");
  for (const CapacityRow& row : rows) {
    const double smaller = PerSequence(rows[0], page_bytes) / PerSequence(row, page_bytes);
    const double formula = static_cast<double>(rows[0].kept_tokens) / static_cast<double>(row.kept_tokens);
    text += fmt::format("{:<12} {:>13} {:>15.1f} {:>8.2f}x {:>9.2f}x {:>7} {:>8.2f}x {:>9.2f} {:>10.0f}\n", row.classes,
                        fmt::format("{}/{}", row.num_global, row.num_heads), PerSequence(row, page_bytes) / (1 << 20),
                        smaller, formula, fmt::format("{}{}", row.at_limit ? ">=" : "", row.sequences),
                        static_cast<double>(row.sequences) / rows[0].sequences, row.step_s * 1e3,
                        row.sequences / row.step_s);
  }
  return text;
}

nlohmann::ordered_json CapacityJson(const std::vector<CapacityRow>& rows, const CapacityOptions& options,
                                    size_t page_bytes) {
  nlohmann::ordered_json out;
  out["config"] = {{"context", options.context},
                   {"kv_bytes", options.kv_bytes},
                   {"steps", options.steps},
                   {"max_sequences", options.max_sequences},
                   {"page_bytes", page_bytes}};
  for (const CapacityRow& row : rows) {
    out["classes"].push_back({{"name", row.classes},
                              {"global_heads", row.num_global},
                              {"heads", row.num_heads},
                              {"kept_tokens", row.kept_tokens},
                              {"pages_per_sequence", row.pages},
                              {"bytes_per_sequence", row.pages * static_cast<int64_t>(page_bytes)},
                              {"sequences", row.sequences},
                              {"at_limit", row.at_limit},
                              {"step_seconds", row.step_s},
                              {"tokens_per_s", row.sequences / row.step_s}});
  }
  return out;
}

}  // namespace spl::cli
