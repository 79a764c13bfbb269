// splice eval: accuracy, time to first token and work done, per task and length, for one or several methods.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <memory>
#include <tuple>

#include "services/base/status.h"
#include "tools/cli/command.h"
#include "tools/cli/eval_data.h"
#include "tools/cli/source_flags.h"
#include "tools/cli/text_generator.h"

namespace spl::cli {
namespace {

using nlohmann::json;

struct Flags {
  SourceFlags source;
  std::vector<std::string> data, reuse = {"exact"}, decode = {"dense"}, provenance = {"context"};
  std::vector<int64_t> lengths;
  int64_t limit = 0;
  uint64_t seed = 0;
  std::string json_file, answers_file;
};

struct Method {
  std::string reuse, decode;
};

// What was seen in one cell of the table.
struct Cell {
  int64_t n = 0, correct = 0;
  std::vector<double> ttft_ms;
  int64_t prompt_tokens = 0, cached = 0, aligned = 0, recomputed = 0, computed = 0, fetched = 0, wire = 0;
};
using CellKey = std::tuple<std::string, int64_t, std::string, std::string>;  // task, length, reuse, decode

// Wilson's interval: sensible at 0 % and 100 % too.
std::pair<double, double> Confidence95(int64_t correct, int64_t n) {
  const double z = 1.96, p = double(correct) / double(n), d = 1 + z * z / double(n);
  const double middle = p + z * z / (2.0 * double(n));
  const double half = z * std::sqrt(p * (1 - p) / double(n) + z * z / (4.0 * double(n) * double(n)));
  return {(middle - half) / d, (middle + half) / d};
}

double Percentile(std::vector<double> values, double p) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(p * static_cast<double>(values.size())))];
}

class Evaluation {
 public:
  Evaluation(TextGenerator& generator, const Flags& flags) : generator_(generator) {
    if (!flags.answers_file.empty()) answers_.open(flags.answers_file, std::ios::trunc);
  }

  // Runs every place where the sample wants an answer; the expected answer goes into the history of the next one.
  absl::Status Run(const EvalSample& sample, const Method& method) {
    std::vector<int32_t> ids;
    size_t place = 0;
    for (const EvalSegment& segment : sample.segments) {
      std::string text = segment.text;
      if (segment.kind == EvalSegment::Kind::kAnswer) {
        SPLICE_RETURN_IF_ERROR(Ask(sample, place, ids, method));
        text = sample.answers[place++] + "<|im_end|>";
      }
      SPLICE_ASSIGN_OR_RETURN(const std::vector<int32_t> part, generator_.Tokenize(text));
      ids.insert(ids.end(), part.begin(), part.end());
    }
    return place == 0 ? Ask(sample, 0, ids, method) : absl::OkStatus();
  }

  void PrintTable() const;
  json ToJson() const;

 private:
  absl::Status Ask(const EvalSample& sample, size_t place, const std::vector<int32_t>& ids, const Method& method) {
    TextRequest request{
        .ids = ids, .max_tokens = sample.max_new_tokens, .reuse = method.reuse, .decode = method.decode};
    auto result = generator_.Generate(request, [](const std::string&) { return true; });
    if (!result.ok()) return Annotate(result.status(), "sample " + sample.id);
    const bool correct = result->text == sample.answers[place];
    Cell& cell = cells_[{sample.task, sample.length, method.reuse, method.decode}];
    ++cell.n;
    cell.correct += correct;
    cell.ttft_ms.push_back(result->ttft_s * 1e3);
    cell.prompt_tokens += result->prompt_tokens;
    Add(result->receipt, cell, result->prompt_tokens);
    if (answers_.is_open())
      answers_ << json{{"id", sample.id},         {"place", place},       {"reuse", method.reuse},
                       {"decode", method.decode}, {"text", result->text}, {"correct", correct}}
                      .dump()
               << '\n';
    return absl::OkStatus();
  }

  // In-process runs have no receipt: they compute everything.
  static void Add(const json& receipt, Cell& cell, int64_t prompt_tokens) {
    if (!receipt.is_object()) {
      cell.computed += prompt_tokens;
      return;
    }
    const auto number = [&](const char* pointer) { return receipt.value(json::json_pointer(pointer), int64_t{0}); };
    cell.cached += number("/tokens/cached");
    cell.aligned += number("/tokens/aligned");
    cell.recomputed += number("/tokens/recomputed");
    cell.computed += number("/tokens/computed");
    cell.fetched += number("/bytes/fetched");
    cell.wire += number("/bytes/moved");
  }

  TextGenerator& generator_;
  std::map<CellKey, Cell> cells_;
  std::ofstream answers_;
};

void Evaluation::PrintTable() const {
  fmt::print("{:<18} {:>6} {:<9} {:<8} {:>5} {:>9} {:>15} {:>9} {:>9} {:>9}\n", "task", "length", "reuse", "decode",
             "n", "accuracy", "95 %", "ttft p50", "ttft p95", "computed");
  for (const auto& [key, cell] : cells_) {
    const auto& [task, length, reuse, decode] = key;
    const auto [low, high] = Confidence95(cell.correct, cell.n);
    fmt::print("{:<18} {:>6} {:<9} {:<8} {:>5} {:>8.1f}% {:>6.1f} – {:>5.1f}% {:>6.0f} ms {:>6.0f} ms {:>8.1f}%\n",
               task, length, reuse, decode, cell.n, 100.0 * double(cell.correct) / double(cell.n), 100 * low,
               100 * high, Percentile(cell.ttft_ms, 0.5), Percentile(cell.ttft_ms, 0.95),
               100.0 * double(cell.computed) / double(std::max<int64_t>(1, cell.prompt_tokens)));
  }
}

json Evaluation::ToJson() const {
  json rows = json::array();
  for (const auto& [key, cell] : cells_) {
    const auto& [task, length, reuse, decode] = key;
    const auto [low, high] = Confidence95(cell.correct, cell.n);
    rows.push_back({{"task", task},
                    {"length", length},
                    {"reuse", reuse},
                    {"decode", decode},
                    {"provenance", "context"},
                    {"n", cell.n},
                    {"accuracy", double(cell.correct) / double(cell.n)},
                    {"ci95", {low, high}},
                    {"ttft_ms", {{"p50", Percentile(cell.ttft_ms, 0.5)}, {"p95", Percentile(cell.ttft_ms, 0.95)}}},
                    {"tokens",
                     {{"prompt", cell.prompt_tokens},
                      {"cached", cell.cached},
                      {"aligned", cell.aligned},
                      {"recomputed", cell.recomputed},
                      {"computed", cell.computed}}},
                    {"bytes", {{"fetched", cell.fetched}, {"wire", cell.wire}}}});
  }
  return {{"rows", rows}};
}

// The samples asked for: those of the lengths wanted, and of each (task, length) the first `limit`.
absl::StatusOr<std::vector<EvalSample>> LoadSamples(const Flags& flags) {
  std::vector<EvalSample> chosen;
  std::map<std::pair<std::string, int64_t>, int64_t> taken;
  for (const std::string& path : flags.data) {
    SPLICE_ASSIGN_OR_RETURN(std::vector<EvalSample> samples, LoadEvalData(path));
    for (EvalSample& sample : samples) {
      if (!flags.lengths.empty() &&
          std::find(flags.lengths.begin(), flags.lengths.end(), sample.length) == flags.lengths.end())
        continue;
      if (flags.limit > 0 && taken[{sample.task, sample.length}]++ >= flags.limit) continue;
      chosen.push_back(std::move(sample));
    }
  }
  if (chosen.empty()) return InvalidArgument("no sample matches --data and --lengths");
  return chosen;
}

absl::Status RunEval(const Flags& flags) {
  for (const std::string& provenance : flags.provenance) {
    if (provenance != "context")
      return Errorf(absl::StatusCode::kUnimplemented,
                    "--provenance {}: this build reuses exact prefixes only (context)", provenance);
  }
  SPLICE_ASSIGN_OR_RETURN(const std::vector<EvalSample> samples, LoadSamples(flags));
  SPLICE_ASSIGN_OR_RETURN(auto generator, MakeTextGenerator(flags.source));
  Evaluation evaluation(*generator, flags);
  const size_t total = samples.size() * flags.reuse.size() * flags.decode.size();
  size_t done = 0;
  const bool progress = ::isatty(STDERR_FILENO) != 0;
  for (const std::string& reuse : flags.reuse) {
    for (const std::string& decode : flags.decode) {
      for (const EvalSample& sample : samples) {
        SPLICE_RETURN_IF_ERROR(evaluation.Run(sample, {reuse, decode}));
        if (progress) fmt::print(stderr, "\r{} of {} samples ", ++done, total);
      }
    }
  }
  if (progress) fmt::print(stderr, "\r{:40}\r", "");
  evaluation.PrintTable();
  if (flags.json_file.empty()) return absl::OkStatus();
  std::ofstream out(flags.json_file, std::ios::trunc);
  out << evaluation.ToJson().dump(1) << '\n';
  return out ? absl::OkStatus() : Errorf(absl::StatusCode::kInternal, "{}: cannot write", flags.json_file);
}

}  // namespace

Command MakeEvalCommand(CLI::App& root) {
  auto flags = std::make_shared<Flags>();
  CLI::App& app = *root.add_subcommand("eval", "Accuracy and cost of reuse and decode methods on an evaluation set");
  app.footer(
      "Example:\n"
      "  splice eval --endpoint http://127.0.0.1:8000 --data qa_names.jsonl.xz,vt.jsonl.xz --limit 50 --json out.json\n"
      "An answer counts when it equals the expected text exactly. The interval is Wilson's, 95 %.");
  AddSourceFlags(app, flags->source);
  app.add_option("--data", flags->data, "JSONL files, plain or .xz, separated by commas")->required()->delimiter(',');
  app.add_option("--reuse", flags->reuse, "prefill methods, separated by commas")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--decode", flags->decode, "decode methods, separated by commas")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--provenance", flags->provenance, "where reused KV was computed: context")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--lengths", flags->lengths, "only samples of these nominal lengths")->delimiter(',');
  app.add_option("--limit", flags->limit, "samples of each task and length; 0: all")->check(CLI::NonNegativeNumber);
  app.add_option("--seed", flags->seed, "for methods that draw random numbers")->capture_default_str();
  app.add_option("--json", flags->json_file, "write the table as JSON");
  app.add_option("--answers", flags->answers_file, "write every answer as a JSON line");
  return {&app, [flags] { return RunEval(*flags); }};
}

}  // namespace spl::cli
