// splice eval: accuracy, time to first token and work done, per task and length, for one or several methods.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <random>

#include "absl/strings/escaping.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "tools/cli/command.h"
#include "tools/cli/eval_data.h"
#include "tools/cli/eval_method.h"
#include "tools/cli/eval_report.h"
#include "tools/cli/local_cluster.h"
#include "tools/cli/source_flags.h"
#include "tools/cli/text_generator.h"

namespace spl::cli {
namespace {

using nlohmann::json;

struct Flags {
  SourceFlags source;
  std::vector<std::string> data, reuse = {"exact"}, decode = {"auto"}, provenance = {"context"};
  std::vector<int64_t> lengths;
  int64_t limit = 0;
  uint64_t kv_bytes = 2ull << 30;
  std::string json_file, html_file, answers_file;
};

// Behind the prompt; empty when the server gave none.
absl::StatusOr<std::vector<float>> FirstLogits(const TextResult& result) {
  if (!result.receipt.is_object() || !result.receipt.contains("first_logits")) return std::vector<float>();
  std::string bytes;
  if (!absl::Base64Unescape(result.receipt["first_logits"].get<std::string>(), &bytes) ||
      bytes.size() % sizeof(float) != 0)
    return Errorf(absl::StatusCode::kDataLoss, "the receipt's first_logits are not base64 of 32-bit floats");
  std::vector<float> logits(bytes.size() / sizeof(float));
  std::memcpy(logits.data(), bytes.data(), bytes.size());
  return logits;
}

class Evaluation {
 public:
  Evaluation(TextGenerator& generator, const Flags& flags) : generator_(generator) {
    if (!flags.answers_file.empty()) answers_.open(flags.answers_file, std::ios::trunc);
    std::random_device random;
    nonce_ = fmt::format("{:08x}{:08x}", random(), random());
  }

  // Runs every place where the sample wants an answer; the expected answer goes into the history of the next one.
  absl::Status Run(const EvalSample& sample, const EvalMethod& method) {
    PromptParts parts;
    size_t place = 0;
    for (const EvalSegment& segment : sample.segments) {
      std::string text = segment.text;
      if (segment.kind == EvalSegment::Kind::kAnswer) {
        SPLICE_RETURN_IF_ERROR(Ask(sample, place, parts, method));
        text = sample.answers[place++] + "<|im_end|>";
      }
      SPLICE_ASSIGN_OR_RETURN(std::vector<int32_t> ids, generator_.Tokenize(text));
      parts.push_back({std::move(ids), segment.kind == EvalSegment::Kind::kReuse});
    }
    return place == 0 ? Ask(sample, 0, parts, method) : absl::OkStatus();
  }

  const EvalReport& report() const { return report_; }

 private:
  struct Part {
    std::vector<int32_t> ids;
    bool reusable = false;
  };
  using PromptParts = std::vector<Part>;

  static void Append(TextRequest& request, const Part& part) {
    const auto begin = static_cast<int64_t>(request.ids.size());
    request.ids.insert(request.ids.end(), part.ids.begin(), part.ids.end());
    if (part.reusable && !part.ids.empty())
      request.segments.push_back({begin, static_cast<int64_t>(request.ids.size())});
  }

  // Every measured request has namespaces of its own, so that it finds what its warm-up left and nothing else.
  TextRequest NewRequest(const std::string& namespace_name) const {
    TextRequest request;
    request.segment_namespace = namespace_name;
    request.reuse_options = {{"namespace", namespace_name + "-prefix"}};
    return request;
  }

  absl::Status WarmUp(const PromptParts& parts, const EvalMethod& method, const std::string& namespace_name) {
    std::vector<TextRequest> requests;
    if (method.provenance == Provenance::kIsolated) {
      for (const Part& part : parts) {
        if (!part.reusable || part.ids.empty()) continue;
        Append(requests.emplace_back(NewRequest(namespace_name)), part);
      }
    } else {
      // The same segments in the same order, behind half of the instructions: elsewhere, and in another context.
      TextRequest& request = requests.emplace_back(NewRequest(namespace_name));
      size_t last = 0;
      for (size_t i = 0; i < parts.size(); ++i) {
        if (parts[i].reusable) last = i;
      }
      for (size_t i = 0; i <= last; ++i) {
        Part part = parts[i];
        if (i == 0 && !part.reusable) part.ids.resize((part.ids.size() + 1) / 2);
        Append(request, part);
      }
    }
    for (TextRequest& request : requests) {
      if (request.ids.empty()) continue;
      request.max_tokens = 1;
      request.reuse = "exact";
      SPLICE_RETURN_IF_ERROR(generator_.Generate(request, [](const std::string&) { return true; }).status());
    }
    return absl::OkStatus();
  }

  absl::Status Ask(const EvalSample& sample, size_t place, const PromptParts& parts, const EvalMethod& method) {
    const std::string namespace_name = fmt::format("eval-{}-{}", nonce_, num_asked_++);
    TextRequest request = NewRequest(namespace_name);
    if (method.reuses_segments()) {
      if (const absl::Status warm = WarmUp(parts, method, namespace_name); !warm.ok())
        return Annotate(warm, "warm-up of sample " + sample.id);
    }
    for (const Part& part : parts) Append(request, part);
    if (!method.reuses_segments()) request.segments.clear();
    request.max_tokens = sample.max_new_tokens;
    request.reuse = method.reuse;
    request.decode = method.decode;
    request.reuse_options.update(method.options);
    request.reuse_options["publish"] = false;
    request.reuse_options["return_first_logits"] = true;
    auto result = generator_.Generate(request, [](const std::string&) { return true; });
    if (!result.ok()) return Annotate(result.status(), "sample " + sample.id);
    const bool correct = result->text == sample.answers[place];
    report_.Add(sample.task, sample.length, method, *result, correct);
    SPLICE_RETURN_IF_ERROR(CompareFirstLogits(sample, place, method, *result));
    if (answers_.is_open())
      answers_ << json{{"id", sample.id},
                       {"place", place},
                       {"reuse", method.label},
                       {"provenance", ProvenanceName(method.provenance)},
                       {"decode", method.decode_label},
                       {"text", result->text},
                       {"correct", correct}}
                      .dump()
               << '\n';
    return absl::OkStatus();
  }

  // With what `exact` gave for the same question, when that was asked, too.
  absl::Status CompareFirstLogits(const EvalSample& sample, size_t place, const EvalMethod& method,
                                  const TextResult& result) {
    SPLICE_ASSIGN_OR_RETURN(std::vector<float> logits, FirstLogits(result));
    const std::string where = fmt::format("{}/{}", sample.id, place);
    if (!method.reuses_segments()) {
      exact_logits_[where] = std::move(logits);
      return absl::OkStatus();
    }
    const auto exact = exact_logits_.find(where);
    if (exact == exact_logits_.end() || logits.empty() || logits.size() != exact->second.size())
      return absl::OkStatus();
    report_.AddFirstLogits(sample.task, sample.length, method, logits, exact->second);
    return absl::OkStatus();
  }

  TextGenerator& generator_;
  EvalReport report_;
  std::map<std::string, std::vector<float>> exact_logits_;  // empty: the server gives none
  std::string nonce_;
  int64_t num_asked_ = 0;
  std::ofstream answers_;
};

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

// `exact` first, so that the others can be compared with it; it does not depend on the provenance and runs once.
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

// A model folder is served by a cluster of its own in this process when a method reuses segments: only workers do.
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
  options.num_threads = flags.source.num_threads;
  options.kv_bytes = flags.kv_bytes;
  SPLICE_ASSIGN_OR_RETURN(source->cluster, LocalCluster::Start(options));
  SPLICE_ASSIGN_OR_RETURN(source->generator, MakeEndpointGenerator("http://" + source->cluster->http_address(), ""));
  return source;
}

absl::Status WriteFile(const std::string& path, const std::string& text) {
  if (path.empty()) return absl::OkStatus();
  std::ofstream out(path, std::ios::trunc);
  out << text;
  return out ? absl::OkStatus() : Errorf(absl::StatusCode::kInternal, "{}: cannot write", path);
}

absl::Status RunEval(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const std::vector<EvalMethod> methods, MethodsOf(flags));
  SPLICE_ASSIGN_OR_RETURN(const std::vector<EvalSample> samples, LoadSamples(flags));
  const bool needs_cluster = std::any_of(methods.begin(), methods.end(), [](const EvalMethod& m) {
    return m.reuse != "exact" || (m.decode != "auto" && m.decode != "dense");
  });
  SPLICE_ASSIGN_OR_RETURN(const auto source, OpenSource(flags, needs_cluster));
  Evaluation evaluation(*source->generator, flags);
  size_t done = 0;
  const bool progress = ::isatty(STDERR_FILENO) != 0;
  for (const EvalMethod& method : methods) {
    for (const EvalSample& sample : samples) {
      SPLICE_RETURN_IF_ERROR(evaluation.Run(sample, method));
      if (progress) fmt::print(stderr, "\r{} of {} samples ", ++done, samples.size() * methods.size());
    }
  }
  if (progress) fmt::print(stderr, "\r{:40}\r", "");
  evaluation.report().PrintTable();
  SPLICE_RETURN_IF_ERROR(
      WriteFile(flags.json_file, flags.json_file.empty() ? "" : evaluation.report().ToJson().dump(1) + "\n"));
  return WriteFile(flags.html_file, evaluation.report().ToHtml("splice eval: " + source->generator->description()));
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
      "Methods other than exact are measured after a warm-up request that leaves the KV of the sample's reusable\n"
      "segments in the cluster. context: all of them in one prompt behind other instructions; isolated: one by one.");
  AddSourceFlags(app, flags->source);
  app.add_option("--data", flags->data, "JSONL files, plain or .xz, separated by commas")->required()->delimiter(',');
  app.add_option("--reuse", flags->reuse, "prefill methods, NAME[:OPTION=NUMBER]…, separated by commas")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--decode", flags->decode, "decode methods, NAME[:OPTION=NUMBER]…, separated by commas")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--provenance", flags->provenance, "where reused KV was computed: context, isolated or both")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--lengths", flags->lengths, "only samples of these nominal lengths")->delimiter(',');
  app.add_option("--limit", flags->limit, "samples of each task and length; 0: all")->check(CLI::NonNegativeNumber);
  app.add_option("--json", flags->json_file, "write the table as JSON");
  app.add_option("--html", flags->html_file, "write a page with plots and the table");
  app.add_option("--answers", flags->answers_file, "write every answer as a JSON line");
  return {&app, [flags] { return RunEval(*flags); }};
}

}  // namespace spl::cli
