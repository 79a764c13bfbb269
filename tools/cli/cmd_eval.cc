// splice eval: accuracy, time to first token and work done, per task and length, for one or several methods.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <memory>

#include "services/base/log.h"
#include "services/base/status.h"
#include "services/engine/model/model_config.h"
#include "services/methods/methods.h"
#include "services/tokenizer/tokenizer.h"
#include "services/wire/request_options.h"
#include "tools/cli/command.h"
#include "tools/cli/eval_data.h"
#include "tools/cli/eval_method.h"
#include "tools/cli/eval_perplexity.h"
#include "tools/cli/eval_report.h"
#include "tools/cli/eval_run.h"
#include "tools/cli/eval_suite.h"
#include "tools/cli/load_model.h"
#include "tools/cli/local_cluster.h"
#include "tools/cli/progress_line.h"
#include "tools/cli/source_flags.h"
#include "tools/cli/text_generator.h"

namespace spl::cli {
namespace {

using nlohmann::json;

struct Flags {
  SourceFlags source;
  std::vector<std::string> data, reuse = {"exact"}, decode = {"auto"}, provenance = {"context"};
  std::string suite;
  std::vector<int64_t> lengths;
  int64_t limit = 0;
  uint64_t kv_bytes = 2ull << 30;
  std::vector<std::string> by;
  std::string perplexity_file;
  PerplexityOptions perplexity;
  std::string history = "expected";
  bool keep_history_kv = false;
  std::string json_file, html_file, answers_file;
};

// Selects samples: those of the wanted lengths, and of each (task, length) the first `limit`.
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

// The next sample of the same task and length, from the beginning again behind the last. Null: there is no other.
const EvalSample* OtherOf(const std::vector<EvalSample>& samples, const EvalSample& sample) {
  const auto at = static_cast<size_t>(&sample - samples.data());
  for (size_t k = 1; k < samples.size(); ++k) {
    const EvalSample& other = samples[(at + k) % samples.size()];
    if (other.task == sample.task && other.length == sample.length) return &other;
  }
  return nullptr;
}

// Puts `exact` first, so that the others can be compared with it. It runs once, because it does not depend on the
// provenance.
absl::StatusOr<std::vector<EvalMethod>> MethodsOf(const Flags& flags) {
  std::vector<EvalMethod> methods;
  for (const std::string& provenance : flags.provenance) {
    for (const std::string& reuse : flags.reuse) {
      for (const std::string& decode : flags.decode) {
        SPLICE_ASSIGN_OR_RETURN(EvalMethod method, ParseEvalMethod(reuse, decode, provenance));
        if (method.reuses_segments() || provenance == flags.provenance.front()) methods.push_back(std::move(method));
      }
    }
  }
  std::stable_partition(methods.begin(), methods.end(), [](const EvalMethod& m) { return !m.reuses_segments(); });
  return methods;
}

// Only workers reuse segments: with such a method, a model folder is served by a cluster in this process.
struct Source {
  std::unique_ptr<LocalCluster> cluster;  // null: none
  std::unique_ptr<TextGenerator> generator;

  ~Source() {
    generator.reset();
    if (cluster) cluster->Stop();
  }
};

absl::StatusOr<std::unique_ptr<Source>> OpenSource(const Flags& flags, bool needs_cluster) {
  auto source = std::make_unique<Source>();
  if (!needs_cluster || flags.source.model.dir.empty()) {
    SPLICE_ASSIGN_OR_RETURN(source->generator, MakeTextGenerator(flags.source));
    return source;
  }
  SPLICE_RETURN_IF_ERROR(log::SetLevel("warning"));
  LocalClusterOptions options;
  options.model = flags.source.model;
  options.tokenizer_dir = flags.source.tokenizer_dir;
  options.http_listen = "127.0.0.1:0";
  options.grpc_listen = "127.0.0.1:0";
  options.backend = flags.source.backend;
  options.kv_dtype = flags.source.kv_dtype;
  options.num_threads = flags.source.num_threads;
  options.kv_bytes = flags.kv_bytes;
  SPLICE_ASSIGN_OR_RETURN(source->cluster, LocalCluster::Start(options));
  SPLICE_ASSIGN_OR_RETURN(source->generator,
                          MakeEndpointGenerator({.url = "http://" + source->cluster->http_address()}));
  return source;
}

absl::StatusOr<EvalRunOptions> RunOptionsOf(const Flags& flags) {
  EvalRunOptions options{.history = flags.history == "generated" ? EvalHistory::kGenerated : EvalHistory::kExpected,
                         .keep_history_kv = flags.keep_history_kv,
                         .answers_file = flags.answers_file};
  for (const std::string& name : flags.by) {
    SPLICE_ASSIGN_OR_RETURN(options.groupings.emplace_back(), ParseEvalGrouping(name));
  }
  return options;
}

absl::Status WriteFile(const std::string& path, const std::string& text) {
  if (path.empty()) return absl::OkStatus();
  std::ofstream out(path, std::ios::trunc);
  out << text;
  return out ? absl::OkStatus() : Errorf(absl::StatusCode::kInternal, "{}: cannot write", path);
}

absl::Status RunPerplexity(const Flags& flags) {
  if (!flags.source.endpoint.empty())
    return InvalidArgument("--perplexity runs in this process: give --model or --random-weights, not --endpoint");
  if (flags.reuse != std::vector<std::string>{"exact"})
    return InvalidArgument("--perplexity computes its contexts exactly: leave --reuse out");
  const std::string& text_dir =
      flags.source.tokenizer_dir.empty() ? flags.source.model.dir : flags.source.tokenizer_dir;
  if (text_dir.empty()) return InvalidArgument("a model with random weights has no tokenizer; give --tokenizer DIR");
  SPLICE_ASSIGN_OR_RETURN(const auto tokenizer, tokenizer::Tokenizer::Load(text_dir));
  SPLICE_ASSIGN_OR_RETURN(const std::vector<PerplexityWindow> windows,
                          LoadPerplexityWindows(flags.perplexity_file, *tokenizer, flags.perplexity));
  SPLICE_ASSIGN_OR_RETURN(const auto model, LoadModelAndShow(flags.source.model, flags.source.backend,
                                                             flags.source.kv_dtype, flags.source.tp));
  std::vector<PerplexityResult> results;
  ProgressLine progress;
  const size_t total = windows.size() * flags.decode.size();
  size_t done = 0;
  for (const std::string& decode : flags.decode) {
    SPLICE_ASSIGN_OR_RETURN(const EvalMethod method, ParseEvalMethod("exact", decode, "context"));
    SPLICE_ASSIGN_OR_RETURN(results.emplace_back(),
                            MeasurePerplexity(model, windows, method, flags.source.num_threads, [&] {
                              ++done;
                              progress.Update(done, total, fmt::format("{} of {} windows", done, total));
                            }));
  }
  progress.Finish();
  PrintPerplexityTable(results, windows);
  return WriteFile(flags.json_file, flags.json_file.empty() ? "" : PerplexityJson(results, windows).dump(1) + "\n");
}

absl::Status RunEval(Flags flags) {
  if (flags.data.empty() == flags.perplexity_file.empty())
    return InvalidArgument("give one of --data FILE and --perplexity FILE");
  if (!flags.perplexity_file.empty()) return RunPerplexity(flags);
  if (!flags.suite.empty()) {
    int32_t num_layers = 0;
    if (!flags.source.model.dir.empty()) {
      SPLICE_ASSIGN_OR_RETURN(const engine::ModelConfig config, engine::LoadModelConfig(flags.source.model.dir));
      num_layers = config.num_layers;
    }
    SPLICE_ASSIGN_OR_RETURN(EvalSuite suite, FindEvalSuite(flags.suite, num_layers));
    flags.reuse = std::move(suite.reuse);
    flags.decode = std::move(suite.decode);
  }
  SPLICE_ASSIGN_OR_RETURN(const std::vector<EvalMethod> methods, MethodsOf(flags));
  SPLICE_ASSIGN_OR_RETURN(const std::vector<EvalSample> samples, LoadSamples(flags));
  SPLICE_ASSIGN_OR_RETURN(const EvalRunOptions options, RunOptionsOf(flags));
  const bool needs_cluster =
      flags.keep_history_kv || std::any_of(methods.begin(), methods.end(), [](const EvalMethod& m) {
        return m.reuse != methods::kExact || !methods::IsDense(m.decode);
      });
  SPLICE_ASSIGN_OR_RETURN(const auto source, OpenSource(flags, needs_cluster));
  EvalRun evaluation(*source->generator, options);
  size_t done = 0;
  const size_t total = samples.size() * methods.size();
  ProgressLine progress;
  for (const EvalMethod& method : methods) {
    for (const EvalSample& sample : samples) {
      const absl::Status status = evaluation.Run(sample, method, OtherOf(samples, sample));
      if (!status.ok() && !flags.suite.empty()) {  // a cluster does not serve all pairs; the others still run
        evaluation.Refuse(method, status);
        done += samples.size();
        break;
      }
      SPLICE_RETURN_IF_ERROR(status);
      ++done;
      progress.Update(done, total, fmt::format("{} of {} samples", done, total));
    }
  }
  progress.Finish();
  evaluation.report().PrintTable();
  SPLICE_RETURN_IF_ERROR(
      WriteFile(flags.json_file, flags.json_file.empty() ? "" : evaluation.report().ToJson().dump(1) + "\n"));
  return WriteFile(flags.html_file, evaluation.report().ToHtml("splice eval: " + source->generator->description()));
}

// Ends the program before anything else is asked of its options.
void PrintMethods() {
  fmt::print("{}", wire::OptionsPage());
  throw CLI::Success();
}

}  // namespace

Command MakeEvalCommand(CLI::App& root) {
  auto flags = std::make_shared<Flags>();
  CLI::App& app = *root.add_subcommand("eval", "Accuracy and cost of reuse and decode methods on an evaluation set");
  app.footer(
      "Example:\n"
      "  splice eval --model models/splice-tiny --data vt.jsonl.xz,memory.jsonl.xz --lengths 4096 --limit 50 \\\n"
      "    --reuse exact,naive,sparsex,sparsex:dense_layers=1:recompute_share=0.1 --provenance context,isolated \\\n"
      "    --json out.json --html out.html\n"
      "An answer counts when it equals the expected text exactly. The interval is Wilson's, 95 %.\n"
      "Methods that reuse segments are measured after a warm-up request that leaves the KV of the sample's reusable\n"
      "segments in the cluster. context: all of them in one prompt behind other instructions; isolated: one by one;\n"
      "foreign: each at its place behind the text of another sample, as chunks of one size are in a cache.\n"
      "SamKV (docs/samkv.md): --reuse samkv:budget_ratio=0.25,samkv:choose=attention:recompute=attended (a word is an\n"
      "option's value, too)\n"
      "Cold prompts (docs/cold-prompts.md): --reuse exact,loopserve:line_min_span=2048,minference,a-shape,tri-shape\n"
      "All methods in one table and on one page, with the decode budgets a sixteenth of the context:\n"
      "  splice eval --model models/splice-tiny --suite methods --provenance isolated --lengths 4096 --limit 2 \\\n"
      "    --data SETS --html methods.html\n"
      "Turns and perplexity: docs/evaluation.md\n"
      "  splice eval --model models/splice-tiny --perplexity held-out.txt --context 4096 --tokens 256 \\\n"
      "    --decode dense,sparcas:budget=512,quest:budget=512,streaming:budget=512");
  AddSourceFlags(app, flags->source);
  app.add_option("--data", flags->data, "JSONL files, plain or .xz, separated by commas")
      ->delimiter(',')
      ->check(CLI::ExistingFile);
  app.add_option("--reuse", flags->reuse, "prefill methods, NAME[:OPTION=NUMBER]…, separated by commas")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--decode", flags->decode, "decode methods, NAME[:OPTION=NUMBER]…, separated by commas")
      ->delimiter(',')
      ->capture_default_str();
  app.add_flag_callback("--methods", PrintMethods, "print all methods and their options, and exit");
  app.add_option("--provenance", flags->provenance, "where reused KV was computed: context, isolated, foreign")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--suite", flags->suite,
                 "instead of --reuse and --decode: methods, every prefill method by every decode method; recovery, "
                 "settings of sparsex for splice profile --recovery-from")
      ->check(CLI::IsMember({"methods", "recovery"}));
  app.add_option("--lengths", flags->lengths, "only samples of these nominal lengths")->delimiter(',');
  app.add_option("--limit", flags->limit, "samples of each task and length; 0: all")->check(CLI::NonNegativeNumber);
  app.add_option("--by", flags->by,
                 "break the cells down by position (of the question in its turn's new text), turn, or both")
      ->delimiter(',');
  app.add_option("--history", flags->history, "answers in the history of a later turn: expected or generated")
      ->check(CLI::IsMember({"expected", "generated"}))
      ->capture_default_str();
  app.add_flag("--keep-history-kv", flags->keep_history_kv,
               "a turn finds the KV of the turns before; with methods that reuse no segments");
  app.add_option("--perplexity", flags->perplexity_file,
                 "instead of --data: score the tokens of a text, or the answers of a .jsonl set, step by step");
  app.add_option("--context", flags->perplexity.context_tokens, "with --perplexity: tokens in front of the scored ones")
      ->capture_default_str();
  app.add_option("--tokens", flags->perplexity.scored_tokens, "with --perplexity: scored tokens of a window")
      ->capture_default_str();
  app.add_option("--windows", flags->perplexity.num_windows, "with --perplexity: windows of the text")
      ->capture_default_str();
  app.add_option("--json", flags->json_file, "write the table as JSON");
  app.add_option("--html", flags->html_file, "write a page with plots and the table");
  app.add_option("--answers", flags->answers_file, "write every answer as a JSON line");
  return {&app, [flags]() -> absl::Status {
            SPLICE_RETURN_IF_ERROR(ResolveModel(flags->source.model.dir));
            return RunEval(*flags);
          }};
}

}  // namespace spl::cli
