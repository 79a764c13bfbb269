// splice serve: the whole cluster in one process.
#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <memory>

#include "services/base/byte_size_option.h"
#include "services/base/log.h"
#include "services/base/shutdown_signal.h"
#include "services/base/status.h"
#include "services/router/request/generation_config_flag.h"
#include "services/worker_flags/worker_flags.h"
#include "tools/cli/command.h"
#include "tools/cli/local_cluster.h"
#include "tools/cli/model_fetch.h"
#include "tools/cli/progress_line.h"

namespace spl::cli {
namespace {

struct Flags {
  LocalClusterOptions cluster;
  std::string log_level = "auto";
};

// Commands for a person to go on with; programs read the line that begins with "ready".
void PrintNextSteps(const router::RouterServer& router, const Flags& flags) {
  const std::string url = (router.tls() ? "https://" : "http://") + router.http_address();
  const bool keys = !flags.cluster.api_keys_file.empty();
  const std::string chat_flags = std::string(router.tls() ? " --ca CA.crt" : "") + (keys ? " --api-key KEY" : "");
  const std::string curl_flags =
      std::string(router.tls() ? " --cacert CA.crt" : "") + (keys ? " -H 'Authorization: Bearer KEY'" : "");
  fmt::print(
      "\nTalk to it:    splice chat --endpoint {0}{1}\n"
      "Ask once:      curl {0}/v1/chat/completions{2} -H 'Content-Type: application/json' \\\n"
      "                 -d '{{\"messages\":[{{\"role\":\"user\",\"content\":\"Hello\"}}]}}'\n"
      "Watch it:      splice ctl top --url {0}{1}        or in a browser: {0}/ui\n",
      url, chat_flags, curl_flags);
}

absl::Status RunServe(Flags& flags) {
  const bool person = ::isatty(STDERR_FILENO) != 0;
  if (flags.log_level == "auto") flags.log_level = person ? "warning" : "info";
  SPLICE_RETURN_IF_ERROR(log::SetLevel(flags.log_level));
  SPLICE_RETURN_IF_ERROR(ResolveModel(flags.cluster.model.dir));
  ShutdownSignal stop;  // before any thread
  std::unique_ptr<LocalCluster> cluster;
  {
    StageLine stage;
    flags.cluster.on_stage = [&](const char* name) { stage.Begin(name); };
    flags.cluster.on_load = [&](uint64_t done_bytes, uint64_t total_bytes) { stage.Update(done_bytes, total_bytes); };
    flags.cluster.fetch_by_cost = true;
    SPLICE_ASSIGN_OR_RETURN(cluster, LocalCluster::Start(flags.cluster));
    flags.cluster.on_stage = nullptr;
    flags.cluster.on_load = nullptr;
  }
  fmt::print("{}\n", router::ReadyLine(cluster->router()));
  if (::isatty(STDOUT_FILENO) != 0) PrintNextSteps(cluster->router(), flags);
  std::fflush(stdout);
  stop.Wait();
  if (const size_t left = cluster->num_requests(); person && left > 0)
    fmt::print(stderr, "requests under way: {}; they have 30 s to finish, and Ctrl-C again ends at once\n", left);
  cluster->Stop();
  return absl::OkStatus();
}

void AddEssentialFlags(CLI::App& app, LocalClusterOptions& c) {
  app.option_defaults()->group("Essential");
  app.add_option("--http", c.http_listen, "HOST:PORT of the HTTP API; port 0 picks a free one")->capture_default_str();
  app.add_option("--grpc", c.grpc_listen, "HOST:PORT of the gRPC API; port 0 picks a free one")->capture_default_str();
  app.add_option("--backend", c.backend, "auto, cpu, cuda or cuda:GPU")->capture_default_str();
  app.add_option_function<int32_t>(
         "--tp", [&c](int32_t tp) { c.prefill_tp = c.decode_tp = tp; },
         "tensor parallelism of both workers: GPUs over which the model is split, from the first on (default 1)")
      ->check(CLI::IsMember({1, 2, 4, 8}))
      ->trigger_on_parse();
  AddByteSizeOrAutoOption(
      app, "--kv-bytes", c.kv_bytes,
      "size of the KV page pool, which both workers share, over all GPUs of --tp, e.g. 4GiB; auto: the free memory of "
      "the GPU after the weights minus a margin, on the CPU a quarter of the available memory; never more than the "
      "model's sequences need. With --kv-transport or different tensor parallelism each worker has its own pool");
  app.add_option("--data-dir", c.data_dir, "folder of the chunk store's disk tier; empty: KV is kept in memory only");
  app.add_option("--api-keys", c.api_keys_file,
                 "file with one 'key [name]' a line; empty: no authentication, loopback only");
}

void AddModelFlags(CLI::App& app, LocalClusterOptions& c) {
  app.option_defaults()->group("Model files and formats");
  RequireModelSource(app, c.model, kModelHelp);
  app.add_option("--tokenizer", c.tokenizer_dir,
                 "folder with tokenizer.json and chat template; default: the model folder. With --random-weights and "
                 "without it, requests must send token ids and the answers have no text");
  router::AddGenerationConfigFlag(app, c.generation_config);
  app.add_option(
         "--tool-parser", c.output_format.tools,
         "how the model writes calls of tools: auto (by its chat template), none, deepseek, glm4, harmony, hermes, "
         "json, llama3_json, mistral, pythonic or qwen3_coder")
      ->capture_default_str();
  app.add_option("--reasoning-parser", c.output_format.reasoning,
                 "how the model writes its reasoning: auto (by its chat template), none, think or harmony")
      ->capture_default_str();
  app.add_option("--tool-result-documents", c.tool_result_documents, router::kToolResultDocumentsHelp)
      ->capture_default_str();
}

// Who may call, and what requests may hold.
void AddAccessFlags(CLI::App& app, LocalClusterOptions& c) {
  app.option_defaults()->group("Access");
  app.add_option("--secret-file", c.secret_file,
                 "secret from which the callers' namespaces are derived, 16 bytes or more; default: the API keys");
  app.add_flag("--insecure-open", c.insecure_open,
               "without --api-keys: serve every client on --http and --grpc, also on addresses other than loopback");
  c.public_tls.Register(app);
  app.add_option("--cors-origins", c.cors_origins,
                 "origins of web pages that may use the OpenAI API in a browser, separated by commas; * is all")
      ->delimiter(',');
  app.add_flag("--special-tokens-in-text", c.special_tokens_in_text,
               "parse special tokens in messages and segments as well: their authors can then write system messages");
  app.add_flag("--strict-requests", c.strict_requests,
               "HTTP: refuse a field that has no effect, instead of naming it in x-splice-ignored");
}

void AddKvFlags(CLI::App& app, LocalClusterOptions& c) {
  app.option_defaults()->group("KV cache and chunk store");
  app.add_option("--kv-dtype", c.kv_dtype, kKvDtypeHelp)->capture_default_str();
  app.add_option("--kv-transport", c.kv_transport,
                 "how KV travels from prefill to decode: auto, device (GPU to GPU), shm or tcp")
      ->check(CLI::IsMember({"auto", "device", "shm", "tcp"}))
      ->capture_default_str();
  AddByteSizeOption(app, "--store-memory-bytes", c.store_memory_bytes, "memory tier of the chunk store");
  AddByteSizeOption(app, "--store-disk-bytes", c.store_disk_bytes, "disk tier of the chunk store");
}

// How the model is spread, and how prompts and running sequences share the device.
void AddSchedulingFlags(CLI::App& app, LocalClusterOptions& c) {
  app.option_defaults()->group("Devices and scheduling");
  app.add_option("--prefill-tp", c.prefill_tp, "tensor parallelism of the prefill worker")
      ->check(CLI::IsMember({1, 2, 4, 8}));
  app.add_option("--decode-tp", c.decode_tp, "tensor parallelism of the decode worker")
      ->check(CLI::IsMember({1, 2, 4, 8}));
  app.add_option("--threads", c.num_threads, "compute threads of each worker; 0: one per core")
      ->check(CLI::Range(0, 1024));
  app.add_option("--slice-tokens", c.slice_tokens,
                 "most tokens of one prefill slice (chunked prefill), a multiple of 64; 0: 512 on a CPU, 2048 on a "
                 "GPU. Slices are shorter while sequences run, see --itl-target-ms")
      ->check(CLI::Range(0, 65536))
      ->capture_default_str();
  app.add_option("--itl-target-ms", c.itl_target_ms,
                 "longest time between two tokens while prompts are computed, if a slice of 128 tokens and a decode "
                 "step fit into it. On a GPU a step of few sequences waits so long for a pass of a prompt to share. "
                 "0: on a CPU slices and steps alternate, on a GPU steps never wait")
      ->check(CLI::Range(0, 60000))
      ->capture_default_str();
  app.add_option("--max-sequences", c.max_sequences, "most sequences in a decode batch; 0: 64 on a CPU, 256 on a GPU")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  AddByteSizeOption(app, "--host-tier-bytes", c.host_tier_bytes, kHostTierBytesHelp);
  app.add_flag("--no-async-scheduling", c.no_async_scheduling, kNoAsyncSchedulingHelp);
  app.add_flag("--no-step-costs", c.no_step_costs, kNoStepCostsHelp);
}

void AddMetricsAndTraceFlags(CLI::App& app, Flags& flags) {
  LocalClusterOptions& c = flags.cluster;
  app.option_defaults()->group("Metrics, traces and logs");
  app.add_flag("--vllm-metric-names", c.vllm_metric_names,
               "add vLLM's metrics to /metrics under vLLM's names, with the label model_name");
  app.add_option("--fidelity-share", c.fidelity_share,
                 "share of the requests with an approximate method that are also computed exactly in the background, "
                 "to compare logits (splice_fidelity_*)")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  app.add_option("--quality-share", c.quality_share, kQualityShareHelp)
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  c.trace.Register(app);
  app.add_option("--trace-ui-url", c.trace_ui_url, router::kTraceUiUrlHelp);
  app.add_option("--log-level", flags.log_level,
                 "debug, info, warning or error; auto: warning on a terminal, info elsewhere")
      ->capture_default_str();
}

}  // namespace

Command MakeServeCommand(CLI::App& root) {
  auto flags = std::make_shared<Flags>();
  CLI::App& app = *root.add_subcommand(
      "serve", "Router, prefill, decode and chunk store in one process; OpenAI-compatible HTTP and gRPC");
  app.footer(
      "Examples:\n"
      "  splice serve --model Qwen/Qwen3-8B\n"
      "  splice serve --model models/splice-tiny --http 127.0.0.1:8000 --data-dir /var/lib/splice\n"
      "  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\\n"
      "    -d '{\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}]}'\n\n"
      "Prints \"ready http=HOST:PORT grpc=HOST:PORT\" once it serves, with https:// and grpcs:// in front when it has "
      "a\n"
      "certificate. SIGTERM drains and exits 0.");
  LocalClusterOptions& c = flags->cluster;
  AddEssentialFlags(app, c);
  AddModelFlags(app, c);
  AddAccessFlags(app, c);
  AddKvFlags(app, c);
  AddSchedulingFlags(app, c);
  AddMetricsAndTraceFlags(app, *flags);
  app.final_callback([flags] {
    const absl::Status tls = flags->cluster.public_tls.Check();
    if (!tls.ok()) throw CLI::ValidationError(MessageOf(tls));
  });
  return {&app, [flags] { return RunServe(*flags); }};
}

}  // namespace spl::cli
