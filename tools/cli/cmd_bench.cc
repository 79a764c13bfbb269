// splice bench: puts load on an endpoint and measures latencies; or measures how many sequences a page pool holds, the
// turns of conversations, or a simulated cluster.
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>

#include "services/base/byte_size_option.h"
#include "services/base/status.h"
#include "services/worker_flags/worker_flags.h"
#include "tools/cli/capacity_bench.h"
#include "tools/cli/cmd_simulate.h"
#include "tools/cli/command.h"
#include "tools/cli/conversation_bench.h"
#include "tools/cli/interrupt.h"
#include "tools/cli/load_client.h"
#include "tools/cli/load_model.h"
#include "tools/cli/load_plan.h"
#include "tools/cli/load_report.h"
#include "tools/cli/progress_line.h"

namespace spl::cli {
namespace {

// Ordinary words, whose token ids are the alphabet of synthetic prompts in any vocabulary.
constexpr char kAlphabetText[] =
    "The committee of the city met again in the spring to talk about water, roads and the price of bread. Nobody knew "
    "how long it would take, but everyone had brought numbers: seventeen pages, four maps, and a letter from 1962 that "
    "began with an apology. Outside, the market was already loud, and a small dog slept under the first table.";

constexpr uint32_t kDefaultConcurrency = 8;

struct Flags {
  std::string endpoint, model, api_key, ca_file, trace, json_file;
  uint32_t concurrency = 0;
  double rate = 0;
  LoadPlanOptions plan;
  uint32_t num_requests = 0;
  uint32_t prompt_ids = 0;
  double slo_ttft_ms = 0, slo_tpot_ms = 0;
  uint32_t timeout_s = 600;
  // --turns.
  ConversationOptions talk{.turns = 0};
  std::string page_file;
  // --capacity.
  bool capacity = false;
  CapacityOptions room;
  std::vector<std::string> head_classes = {"safe", "mid", "paper"};
  std::string random_weights, backend = "auto", kv_dtype = "auto";
  int32_t tp = 1;
  // --simulate.
  SimulateFlags sim;
};

// Token ids of ordinary text, from the server's own tokenizer.
absl::StatusOr<std::vector<int32_t>> FetchAlphabet(const LoadOptions& load, const std::string& model) {
  nlohmann::json body = {{"prompt", kAlphabetText}, {"add_special_tokens", false}};
  if (!model.empty()) body["model"] = model;
  SPLICE_ASSIGN_OR_RETURN(const std::string text, FetchJson(load, "POST", "/tokenize", body.dump()));
  const nlohmann::json answer = nlohmann::json::parse(text, nullptr, false);
  std::vector<int32_t> ids;
  if (answer.is_object() && answer.contains("tokens") && answer["tokens"].is_array()) {
    for (const auto& id : answer["tokens"]) {
      if (id.is_number_integer()) ids.push_back(id.get<int32_t>());
    }
  }
  if (ids.empty()) return Errorf(absl::StatusCode::kFailedPrecondition, "/tokenize gave no token ids");
  return ids;
}

std::string ProgressText(const LoadProgress& p) {
  return fmt::format("{} of {} done, {} running, {} failed, {:.1f} requests/s, {:.0f} events/s", p.finished, p.total,
                     p.running, p.failed, p.finished / std::max(p.elapsed_s, 1e-9),
                     static_cast<double>(p.output_events) / std::max(p.elapsed_s, 1e-9));
}

absl::StatusOr<std::vector<int32_t>> Alphabet(const Flags& flags, const LoadOptions& load) {
  if (flags.prompt_ids == 0) return FetchAlphabet(load, flags.model);
  std::vector<int32_t> ids(flags.prompt_ids);
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

absl::StatusOr<std::vector<PlannedRequest>> MakePlan(const Flags& flags, const LoadOptions& load) {
  LoadPlanOptions options = flags.plan;
  options.model = flags.model;
  options.rate_per_s = flags.rate;
  options.num_requests = flags.num_requests;
  SPLICE_ASSIGN_OR_RETURN(options.alphabet, Alphabet(flags, load));
  if (!flags.trace.empty()) return ReadTracePlan(flags.trace, options, flags.concurrency == 0);
  if (options.num_requests == 0) options.num_requests = flags.concurrency > 0 ? 8 * flags.concurrency : 100;
  return MakeSyntheticPlan(options);
}

absl::Status WriteFile(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  if (!file) return Errorf(absl::StatusCode::kUnavailable, "{}: cannot be written", path);
  return absl::OkStatus();
}

absl::Status WriteJson(const Flags& flags, const nlohmann::ordered_json& out) {
  const std::string text = out.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  if (flags.json_file != "-") return WriteFile(flags.json_file, text);
  fmt::print("{}", text);
  return absl::OkStatus();
}

// The map of a preset, from the model's profile if it has one, otherwise with global heads spread over the model; or
// the map of a file.
absl::StatusOr<engine::HeadClassMap> MakeMap(const std::string& name, const engine::Model& model) {
  const engine::ModelConfig& config = model.config();
  if (const auto preset = engine::FindHeadPreset(name); preset.ok()) {
    const auto& own = model.head_classes();
    if (own != nullptr && !own->profile().empty())
      return engine::HeadClassMap::FromProfile(config.num_layers, config.num_kv_heads, own->profile(), *preset);
    return engine::HeadClassMap::Spread(config.num_layers, config.num_kv_heads, *preset);
  }
  SPLICE_ASSIGN_OR_RETURN(engine::HeadClassMap map, engine::HeadClassMap::Load(name));
  SPLICE_RETURN_IF_ERROR(map.CheckModel(config.num_layers, config.num_kv_heads, model.fingerprint()));
  return map;
}

absl::Status RunCapacity(const Flags& flags) {
  const ModelSource source{.dir = flags.model, .random_weights = flags.random_weights};
  SPLICE_ASSIGN_OR_RETURN(const auto model, LoadModelAndShow(source, flags.backend, flags.kv_dtype, flags.tp));
  std::vector<CapacityRow> rows;
  SPLICE_ASSIGN_OR_RETURN(rows.emplace_back(), MeasureCapacity(model, flags.room, "dense", nullptr));
  for (const std::string& name : flags.head_classes) {
    SPLICE_ASSIGN_OR_RETURN(const engine::HeadClassMap map, MakeMap(name, *model));
    SPLICE_ASSIGN_OR_RETURN(rows.emplace_back(), MeasureCapacity(model, flags.room, name, &map));
  }
  if (flags.json_file != "-") fmt::print("{}", CapacityText(rows, flags.room, model->page_bytes()));
  return flags.json_file.empty() ? absl::OkStatus()
                                 : WriteJson(flags, CapacityJson(rows, flags.room, model->page_bytes()));
}

absl::Status RunConversations(const Flags& flags, const LoadOptions& load) {
  ConversationOptions options = flags.talk;
  options.first_tokens = static_cast<int32_t>(flags.plan.input_tokens);
  options.answer_tokens = static_cast<int32_t>(flags.plan.output_tokens);
  options.seed = flags.plan.seed;
  options.stop = &Interrupt::noted();
  const Interrupt interrupt({SIGINT});
  SPLICE_ASSIGN_OR_RETURN(options.alphabet, Alphabet(flags, load));
  SPLICE_ASSIGN_OR_RETURN(
      const auto generator,
      MakeEndpointGenerator({.url = flags.endpoint, .api_key = flags.api_key, .ca_file = flags.ca_file}));
  ProgressLine line;
  const auto progress = [&](const std::string& method, int32_t conversation, int32_t turn) {
    line.Update(0, 0,
                fmt::format("{}: conversation {} of {}, turn {} of {}", method, conversation, options.conversations,
                            turn, options.turns));
  };
  const auto turns = MeasureConversations(*generator, options, progress);
  line.Finish();
  SPLICE_RETURN_IF_ERROR(turns.status());
  if (flags.json_file != "-") fmt::print("{}", ConversationText(*turns));
  if (!flags.page_file.empty()) SPLICE_RETURN_IF_ERROR(WriteFile(flags.page_file, ConversationPage(*turns)));
  if (!flags.json_file.empty()) SPLICE_RETURN_IF_ERROR(WriteJson(flags, ConversationJson(*turns, options)));
  if (options.stopped()) return absl::CancelledError("interrupted: the turns so far are counted");
  return absl::OkStatus();
}

absl::Status WriteJson(const Flags& flags, const LoadReport& report, const Slo& slo) {
  nlohmann::ordered_json out;
  out["config"] = {{"endpoint", flags.endpoint},
                   {"concurrency", flags.concurrency},
                   {"rate_per_s", flags.rate},
                   {"trace", flags.trace},
                   {"input_tokens", flags.plan.input_tokens},
                   {"shared_prefix_tokens", flags.plan.shared_prefix_tokens},
                   {"output_tokens", flags.plan.output_tokens},
                   {"seed", flags.plan.seed}};
  out.update(ToJson(report, slo));
  return WriteJson(flags, out);
}

absl::Status RunBench(const Flags& flags) {
  if (flags.capacity) return RunCapacity(flags);
  if (flags.sim.simulate) {
    return RunSimulations(flags.sim, flags.trace, flags.rate, flags.num_requests, flags.plan.seed, flags.json_file);
  }
  LoadOptions load;
  SPLICE_ASSIGN_OR_RETURN(load.endpoint, ParseApiUrl(flags.endpoint));
  load.api_key = flags.api_key;
  load.ca_file = flags.ca_file;
  load.timeout = std::chrono::seconds(flags.timeout_s);
  if (flags.talk.turns > 0) return RunConversations(flags, load);
  SPLICE_ASSIGN_OR_RETURN(const std::vector<PlannedRequest> plan, MakePlan(flags, load));
  load.open_loop = flags.concurrency == 0;
  load.concurrency = load.open_loop ? 4096 : flags.concurrency;

  load.stop = &Interrupt::noted();
  const Interrupt interrupt({SIGINT});
  ProgressLine progress;
  SPLICE_ASSIGN_OR_RETURN(const LoadOutcome outcome, RunLoad(load, plan, [&](const LoadProgress& at) {
                            progress.Update(at.finished, at.total, ProgressText(at));
                          }));
  progress.Finish();

  Slo slo;
  if (flags.slo_ttft_ms > 0) slo.ttft_ms = flags.slo_ttft_ms;
  if (flags.slo_tpot_ms > 0) slo.tpot_ms = flags.slo_tpot_ms;
  const LoadReport report = MakeReport(outcome, slo);
  if (flags.json_file != "-") fmt::print("{}", ToText(report, slo));
  if (!flags.json_file.empty()) SPLICE_RETURN_IF_ERROR(WriteJson(flags, report, slo));
  if (outcome.stopped)
    return Errorf(absl::StatusCode::kCancelled, "interrupted: {} of {} requests were finished and are counted",
                  outcome.results.size(), plan.size());
  if (report.num_ok == 0) {
    return Errorf(absl::StatusCode::kUnavailable, "no request succeeded; the first error: {}",
                  report.errors.empty() ? "none" : report.errors.begin()->first);
  }
  return absl::OkStatus();
}

// Options that others refer to.
struct AddedOptions {
  CLI::Option *endpoint = nullptr, *capacity = nullptr, *context = nullptr, *turns = nullptr, *concurrency = nullptr,
              *rate = nullptr, *trace = nullptr;
};

void AddServerOptions(CLI::App& app, Flags& flags, AddedOptions& added) {
  added.endpoint = app.add_option("--endpoint", flags.endpoint, "http[s]://HOST:PORT of the API");
  app.add_option("--model", flags.model, "Model name (default: the only one served); with --capacity its folder");
  app.add_option("--api-key", flags.api_key, "Bearer token; also from SPLICE_API_KEY")->envname("SPLICE_API_KEY");
  AddCaFlag(app, flags.ca_file);
  app.add_option("--timeout-s", flags.timeout_s, "Timeout of one request")->capture_default_str();
  app.add_option("--json", flags.json_file, "Also write the numbers as JSON (\"-\": to stdout, instead of the table)");
}

void AddLoadOptions(CLI::App& app, Flags& flags, AddedOptions& added) {
  app.option_defaults()->group("Load");
  added.concurrency = app.add_option("--concurrency", flags.concurrency,
                                     "Streams at once (closed loop); default: 8, without --rate and --trace")
                          ->check(CLI::Range(1, 65536));
  added.rate = app.add_option("--rate", flags.rate, "Requests per second, Poisson arrivals (open loop)")
                   ->check(CLI::PositiveNumber)
                   ->excludes(added.concurrency);
  added.trace = app.add_option("--trace", flags.trace, "JSONL trace of requests")->check(CLI::ExistingFile);
  app.add_option("--input-tokens", flags.plan.input_tokens, "Prompt tokens of each request")
      ->check(CLI::Range(1u, 1u << 20))
      ->capture_default_str();
  app.add_option("--shared-prefix-tokens", flags.plan.shared_prefix_tokens,
                 "Prompt tokens that are equal in all requests")
      ->capture_default_str();
  app.add_option("--prompt-ids", flags.prompt_ids,
                 "Draw prompts from the token ids [0, N) instead of the server's words; for a model without tokenizer")
      ->check(CLI::Range(1u, 1u << 24));
  app.add_option("--output-tokens", flags.plan.output_tokens, "Tokens to generate for each request")
      ->check(CLI::Range(1u, 1u << 20))
      ->capture_default_str();
  app.add_option("--num-requests", flags.num_requests, "0: 8 per stream, 100 at a rate, the whole trace");
  app.add_option("--slo-ttft-ms", flags.slo_ttft_ms, "Goodput counts requests with at most this TTFT");
  app.add_option("--slo-tpot-ms", flags.slo_tpot_ms, "Goodput counts requests with at most this time per output token");
  app.add_option("--temperature", flags.plan.temperature)->capture_default_str();
  app.add_option("--seed", flags.plan.seed, "Seed of prompts and arrivals: the same seed sends the same load")
      ->capture_default_str();
}

void AddTurnOptions(CLI::App& app, Flags& flags, AddedOptions& added) {
  app.option_defaults()->group("Turns of conversations (--turns)");
  added.turns = app.add_option("--turns", flags.talk.turns,
                               "Instead: conversations of so many turns; the first has --input-tokens, each answer "
                               "--output-tokens")
                    ->check(CLI::Range(1, 1000))
                    ->needs(added.endpoint);
  app.add_option("--turn-tokens", flags.talk.turn_tokens, "With --turns: new text of each turn behind the first")
      ->needs(added.turns)
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--conversations", flags.talk.conversations,
                 "With --turns: conversations over which medians are taken")
      ->needs(added.turns)
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--method", flags.talk.methods, "With --turns: REUSE or REUSE/DECODE, may be given again")
      ->needs(added.turns)
      ->capture_default_str();
  app.add_option("--page", flags.page_file, "With --turns: also write the figure as an HTML page")->needs(added.turns);
}

void AddCapacityOptions(CLI::App& app, Flags& flags, AddedOptions& added) {
  app.option_defaults()->group("Capacity of a page pool (--capacity)");
  added.capacity = app.add_flag("--capacity", flags.capacity,
                                "Instead: how many sequences of --context tokens a page pool holds, and the steps that "
                                "decode all of them")
                       ->excludes(added.endpoint);
  added.context = app.add_option("--context", flags.room.context, "With --capacity: tokens of each sequence")
                      ->needs(added.capacity);
  app.add_option("--head-classes", flags.head_classes,
                 "With --capacity: head classes to compare with dense: safe, mid, paper, or a head_classes.json")
      ->needs(added.capacity)
      ->capture_default_str();
  AddByteSizeOption(app, "--kv-bytes", flags.room.kv_bytes, "With --capacity: memory of the pool")
      ->needs(added.capacity);
  app.add_option("--decode-steps", flags.room.steps, "With --capacity: steps to measure")
      ->needs(added.capacity)
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--max-sequences", flags.room.max_sequences, "With --capacity: most sequences of one step")
      ->needs(added.capacity)
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--random-weights", flags.random_weights, "With --capacity: SHAPE[:SEED], instead of --model")
      ->needs(added.capacity);
  app.add_option("--backend", flags.backend, "With --capacity: auto, cpu, cuda or cuda:GPU")
      ->needs(added.capacity)
      ->capture_default_str();
  app.add_option("--tp", flags.tp, "With --capacity: tensor parallelism")
      ->needs(added.capacity)
      ->check(CLI::IsMember({1, 2, 4, 8}))
      ->capture_default_str();
  app.add_option("--kv-dtype", flags.kv_dtype, "With --capacity: auto, f32, bf16 or fp8")
      ->needs(added.capacity)
      ->capture_default_str();
  app.add_option("--threads", flags.room.num_threads, "With --capacity: compute threads; 0: one per core")
      ->needs(added.capacity);
}

void CheckMode(Flags& flags, const AddedOptions& added) {
  if (flags.capacity) {
    if (added.context->count() == 0) throw CLI::RequiredError("--context");
    if (flags.model.empty() == flags.random_weights.empty())
      throw CLI::RequiredError("one of --model or --random-weights");
    return;
  }
  if (flags.sim.simulate) {
    if (flags.trace.empty() == flags.sim.make_trace.empty()) throw CLI::RequiredError("one of --trace or --make-trace");
    return;
  }
  if (added.endpoint->count() == 0) throw CLI::RequiredError("--endpoint");
  if (added.turns->count() + added.concurrency->count() + added.rate->count() + added.trace->count() == 0)
    flags.concurrency = kDefaultConcurrency;
}

}  // namespace

Command MakeBenchCommand(CLI::App& root) {
  auto flags = std::make_shared<Flags>();
  CLI::App& app = *root.add_subcommand(
      "bench", "Load against an endpoint: TTFT, TPOT, ITL, throughput, goodput; or --turns, --capacity");
  app.footer(
      "Ctrl-C ends the load early: what was measured is shown, and the exit code is 130.\n\nExamples:\n"
      "  splice bench --endpoint http://127.0.0.1:8000\n"
      "  splice bench --endpoint http://127.0.0.1:8000 --concurrency 16 --input-tokens 1024 --output-tokens 128\n"
      "  splice bench --endpoint http://127.0.0.1:8000 --rate 4 --input-tokens 2048 --shared-prefix-tokens 1024 \\\n"
      "               --slo-ttft-ms 500 --slo-tpot-ms 50 --json out.json\n"
      "  splice bench --endpoint http://127.0.0.1:8000 --trace trace.jsonl\n"
      "A trace line: {\"timestamp\": MS, \"input_length\": N, \"output_length\": M, \"hash_ids\": [...]}, or with\n"
      "\"prompt\" or \"messages\". Without --concurrency and --rate a trace is replayed at its own times.\n"
      "The time to the first token from turn to turn of a conversation, with its KV kept and without:\n"
      "  splice bench --endpoint http://127.0.0.1:8000 --turns 10 --input-tokens 14000 --turn-tokens 200 \\\n"
      "               --method exact --method exact/sparcas --page turns.html\n"
      "Placement policies on modelled workers, at four fifths of their load:\n"
      "  splice bench --simulate --make-trace rag --rate 40 --prefill-workers 8 --decode-workers 8 --figure rag.svg\n"
      "How many sequences fit, dense and with head classes, in this process:\n"
      "  splice bench --capacity --model models/splice-tiny --context 8192 --kv-bytes 4GiB");
  AddedOptions added;
  AddServerOptions(app, *flags, added);
  AddLoadOptions(app, *flags, added);
  AddTurnOptions(app, *flags, added);
  AddCapacityOptions(app, *flags, added);
  app.option_defaults()->group("Simulated cluster (--simulate)");
  flags->sim.Register(app);
  app.final_callback([flags, added] { CheckMode(*flags, added); });
  return {&app, [flags] { return RunBench(*flags); }};
}

}  // namespace spl::cli
