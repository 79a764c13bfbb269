#include "services/worker_flags/worker_flags.h"

#include <charconv>
#include <cstdlib>

#include "kernels/backend/backend.h"
#include "kernels/backend/cuda/cuda_plugin.h"
#include "services/base/address.h"
#include "services/base/byte_size_option.h"
#include "services/engine/execution/workspace_bytes.h"
#include "services/engine/model/fp8_activations.h"
#include "services/hub/model_places.h"
#include "services/worker_flags/kv_pool.h"
#include "services/worker_flags/worker_defaults.h"

namespace spl {

void AddModelSourceFlags(CLI::App& app, ModelSource& source, const char* model_help) {
  app.add_option("--model", source.dir, model_help);
  app.add_option("--random-weights", source.random_weights,
                 fmt::format("SHAPE[:SEED]: a model of that shape with reproducible random weights, for measurements; "
                             "{}, or the path of a config.json",
                             fmt::join(engine::RandomShapeNames(), ", ")));
}

void AddHeadClassesFlag(CLI::App& app, ModelSource& source) {
  app.add_option("--head-classes", source.head_classes,
                 "head classes: a head_classes.json (made by splice profile), auto (the one in the model folder) or "
                 "none; with --random-weights also safe, mid or paper")
      ->capture_default_str();
  app.add_option("--recovery-profile", source.recovery_profile,
                 "how sparsex chooses what it recomputes on this model: a recovery.json (made by splice profile "
                 "--recovery-from), auto (the one in the model folder) or none")
      ->capture_default_str();
}

void AddQuantizeFlag(CLI::App& app, ModelSource& source) {
  app.add_option("--quantize", source.quantize,
                 "quantize the weights of the layers while they are loaded: fp8 (e4m3, a scale per output channel), "
                 "int4 (a scale per output channel and 128 columns), or none. Folders in FP8 or int4 need no flag")
      ->check(CLI::IsMember({"none", "fp8", "int4"}))
      ->capture_default_str();
  app.add_flag("!--no-fp8-activations", source.fp8_activations,
               "multiply FP8 weights with activations in bf16 in every product; else a GPU of the Hopper generation "
               "rounds them to FP8 in passes of 192 rows and more, which is faster");
}

void RequireModelSource(CLI::App& app, ModelSource& source, const char* model_help) {
  auto* group = app.add_option_group("model");
  AddModelSourceFlags(*group, source, model_help);
  group->require_option(1);
  AddHeadClassesFlag(app, source);
  AddQuantizeFlag(app, source);
}

namespace {

// Says what is quantized.
void LogQuantization(const engine::Model& model) {
  if (!kernels::IsQuantizedType(model.weight_dtype())) return;
  const engine::WeightQuantization& folder = model.config().quantization;
  log::Info("model.quantized", log::F("model", model.config().name), log::F("weights", model.weights_name()),
            log::F("format", folder.quantized() ? folder.method : "--quantize"),
            log::F("activation_scales", folder.static_activations ? "not used" : "none"),
            log::F("fp8_activations_from_rows", engine::FirstRowsInE4M3(model)));
}

void AddSessionFlags(CLI::App& app, WorkerFlags& flags) {
  app.add_option("--session-share", flags.session_share,
                 "share of the KV pool that conversations may keep between turns; they give way to requests")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  app.add_option("--session-lease", flags.session_lease_s, "seconds for which a conversation keeps its KV after a turn")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
}

void AddFetchFlag(CLI::App& app, WorkerFlags& flags) {
  app.add_option("--fetch", flags.fetch,
                 "what of a prompt to read from --store: cost, unless computing it takes less time; always, all that "
                 "is there, however long it takes")
      ->check(CLI::IsMember({"cost", "always"}))
      ->capture_default_str();
}

void AddDecodeFlags(CLI::App& app, WorkerFlags& flags) {
  app.add_option("--max-sequences", flags.max_sequences,
                 "most sequences in a decode batch; 0: 64 on a CPU, 256 on a GPU")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  app.add_flag("--no-async-scheduling", flags.no_async_scheduling, kNoAsyncSchedulingHelp);
  app.add_flag("--no-step-costs", flags.no_step_costs, kNoStepCostsHelp);
  app.add_option("--local-prefill-tokens", flags.local_prefill_tokens,
                 "most new tokens of a prompt that this worker prefills itself, if that is faster; 0: none")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  AddByteSizeOption(
      app, "--parked-bytes", flags.parked_bytes,
      "host memory for the KV of preempted sequences; if it is full, the router restarts them on another worker");
  AddByteSizeOption(app, "--host-tier-bytes", flags.host_tier_bytes, kHostTierBytesHelp);
  app.add_option(
         "--itl-target-ms", flags.itl_target_ms,
         "longest time between two tokens while prompts are computed here, too, if a slice and a decode step fit into "
         "it. On a GPU a step of few sequences waits so long for a pass of a prompt to share; 0: it runs beside it")
      ->check(CLI::Range(0, 60000))
      ->capture_default_str();
  app.add_option("--local-prefill-slice-tokens", flags.local_prefill_slice_tokens,
                 "prompt tokens between two decode steps, a multiple of 64")
      ->check(CLI::Range(64, 65536))
      ->capture_default_str();
  app.add_option("--store", flags.store,
                 "HOST:PORT of a splice-kvstore, or of several, for --local-prefill-tokens: HOST:PORT,HOST:PORT; "
                 "empty: none");
  AddFetchFlag(app, flags);
}

void AddPrefillFlags(CLI::App& app, WorkerFlags& flags) {
  app.add_option("--slice-tokens", flags.slice_tokens,
                 "tokens of one prefill slice (chunked prefill), a multiple of 64; 0: 512 on a CPU, 2048 on a GPU")
      ->check(CLI::IsMember({0}) | CLI::Range(64, 65536))
      ->capture_default_str();
  app.add_option("--quality-share", flags.quality_share, kQualityShareHelp)
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  app.add_option("--kv-min-gb-per-s", flags.kv_min_gb_per_s,
                 "lowest KV rate to a decode worker, slower ones are refused; 0: no limit")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--store", flags.store,
                 "HOST:PORT of a splice-kvstore, or of several: HOST:PORT,HOST:PORT; empty: none");
  AddFetchFlag(app, flags);
  app.add_flag("!--no-quantized-copies", flags.quantized_copies,
               "store no four-bit copies of the KV of published documents and of samkv's segments. These copies take "
               "19 to 24 % more bytes and shorten TTFT of samkv");
}

}  // namespace

void AddWorkerFlags(CLI::App& app, WorkerRole role, WorkerFlags& flags) {
  RequireModelSource(app, flags.model);
  app.add_option("--listen", flags.listen, "HOST:PORT of the gRPC server; port 0 picks a free one")
      ->capture_default_str();
  app.add_option("--advertise", flags.advertise,
                 "host name or address under which routers and workers reach this worker, for gRPC and KV; required if "
                 "it listens on all addresses (0.0.0.0)");
  flags.membership.Register(app);
  flags.tls_files.Register(app);
  flags.trace.Register(app);
  app.add_option("--metrics-listen", flags.metrics_listen, "HOST:PORT of /metrics, /healthz and /readyz; empty: none")
      ->capture_default_str();
  app.add_flag("--vllm-metric-names", flags.vllm_metric_names,
               "add vLLM's metrics to /metrics under vLLM's names, with the label model_name");
  app.add_option("--served-model-name", flags.served_model_name,
                 "value of the label model_name, as for the router; default: the folder's name");
  app.add_option("--worker-id", flags.worker_id, "name in logs, metrics and receipts; default: random");
  app.add_option("--backend", flags.backend, "auto, cpu, cuda or cuda:GPU")->capture_default_str();
  app.add_option("--tp", flags.tp, "tensor parallelism: GPUs over which the model is split, from the first on")
      ->check(CLI::IsMember({1, 2, 4, 8}))
      ->capture_default_str();
  app.add_option("--kv-dtype", flags.kv_dtype, kKvDtypeHelp)->capture_default_str();
  AddByteSizeOrAutoOption(app, "--kv-bytes", flags.kv_bytes,
                          "size of the KV page pool, over all GPUs of --tp, e.g. 4GiB; auto: the free memory of the "
                          "GPU after the weights minus a margin, on the CPU a quarter of the available memory; never "
                          "more than the model's sequences need. Two workers on one GPU each need a size");
  app.add_option("--threads", flags.num_threads, "compute threads; 0: one per core")->check(CLI::Range(0, 1024));
  app.add_option("--kv-transport", flags.kv_transport,
                 "how KV travels: device (from GPU to GPU of one host), shm, tcp, or auto: the fastest that works")
      ->check(CLI::IsMember({"auto", "device", "shm", "tcp"}))
      ->capture_default_str();
  AddByteSizeOrAutoOption(app, "--host-kv-bytes", flags.host_kv_bytes,
                          role == WorkerRole::kDecode
                              ? "GPU only: page-locked host memory in which KV lands that no GPU of this host writes; "
                                "holds all prompts that are on their way, and no longer ones come. auto: as much as "
                                "the pool, at most 4GiB and an eighth of the available memory"
                              : "GPU only: page-locked host memory through which KV leaves that is not written to the "
                                "other worker directly; auto: 256MiB");
  app.add_option("--kv-listen-host", flags.transport.listen_host,
                 "address that the KV transport listens on and peers reach")
      ->capture_default_str();
  app.add_option("--fidelity-share", flags.fidelity_share,
                 role == WorkerRole::kDecode ? "share of the sequences with sparse decoding for which some steps also "
                                               "run with dense attention, to compare logits (splice_fidelity_*)"
                                             : "share of the prompts with an approximate method that are also computed "
                                               "exactly, at the lowest priority, to compare logits (splice_fidelity_*)")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  AddSessionFlags(app, flags);
  role == WorkerRole::kDecode ? AddDecodeFlags(app, flags) : AddPrefillFlags(app, flags);
  app.add_option("--log-level", flags.log_level, "debug, info, warning or error")->capture_default_str();
  app.add_option("--fault", flags.faults, "NAME=ACTION of a fault point, for tests")->group("");
}

void FillDefaults(const engine::Model& model, WorkerFlags& flags) {
  const WorkerDefaults sizes = SizesOf(model.backend().host_memory(), flags.slice_tokens, flags.max_sequences);
  flags.slice_tokens = sizes.slice_tokens;
  flags.max_sequences = sizes.max_sequences;
}

absl::Status SizeKvPool(WorkerRole role, const engine::Model& model, WorkerFlags& flags) {
  engine::ExecutorOptions executor;
  if (role == WorkerRole::kDecode) {
    executor.max_rows = executor.max_sequences = flags.max_sequences;
  } else {
    executor.max_rows = flags.slice_tokens;
    executor.max_sequences = static_cast<int32_t>(DefaultsOf(model.backend().host_memory()).prompts_at_once);
  }
  KvPoolNeed need = NeedOfPool(role == WorkerRole::kDecode ? "decode" : "prefill", flags.kv_bytes, model, executor);
  if (role == WorkerRole::kDecode && flags.local_prefill_tokens > 0) {
    engine::ExecutorOptions local;
    // A pass may take a decode step along.
    local.max_rows = flags.local_prefill_slice_tokens + engine::PagesFor(flags.max_sequences) * kernels::kPageTokens;
    need.other_bytes += engine::WorkspaceBytes(model, local);
  }
  SPLICE_ASSIGN_OR_RETURN(const std::vector<uint64_t> bytes, SizeKvPools(model, {&need, 1}));
  flags.kv_bytes = bytes[0];
  return absl::OkStatus();
}

std::string VllmModelName(const WorkerFlags& flags, const engine::Model& model) {
  if (!flags.vllm_metric_names) return "";
  return flags.served_model_name.empty() ? model.config().name : flags.served_model_name;
}

absl::Status CheckAddresses(const WorkerFlags& flags) {
  const auto listen = ParseHostPort(flags.listen);
  if (!listen.ok()) return Annotate(listen.status(), "--listen");
  SPLICE_RETURN_IF_ERROR(Annotate(membership::ParseSpec(flags.membership.discovery).status(), "--discovery"));
  const auto is_any = [](const std::string& host) { return host == "0.0.0.0" || host == "::"; };
  if (is_any(flags.advertise))
    return InvalidArgument("--advertise {} is no address that anybody can reach", flags.advertise);
  // With a static list a worker on all addresses works for routers; only its peers cannot call it back.
  if (is_any(listen->host) && flags.advertise.empty() && flags.membership.discovery != "static")
    return InvalidArgument("--listen {} with --discovery {}: give --advertise, the host that others reach",
                           flags.listen, flags.membership.discovery);
  return absl::OkStatus();
}

namespace {

// Makes the device `rank` places after the named one.
absl::StatusOr<std::unique_ptr<kernels::Backend>> MakeRankBackend(const std::string& wanted, int32_t rank) {
  std::string name = wanted;
  if (const char* set = std::getenv("SPLICE_BACKEND"); wanted == "auto" && set != nullptr && *set != '\0') name = set;
  if (name == "cpu") return kernels::MakeCpuBackend();
  const bool is_auto = name == "auto";
  kernels::CudaOptions options;
  if (!is_auto) {
    std::string rest = name;
    options.deterministic = rest.ends_with("+deterministic");
    if (options.deterministic) rest.resize(rest.size() - std::string("+deterministic").size());
    const std::string number = rest.starts_with("cuda:") ? rest.substr(5) : rest == "cuda" ? "0" : "";
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), options.device);
    if (number.empty() || error != std::errc() || end != number.data() + number.size() || options.device < 0)
      return InvalidArgument("--backend is '{}', not auto, cpu, cuda, cuda:GPU or one of these with +deterministic",
                             name);
  }
  options.device += rank;
  auto cuda = kernels::MakeCudaBackend(options);
  if (cuda.ok() || !is_auto) return cuda;
  log::Info("backend.no_cuda", log::F("why", cuda.status()));
  return kernels::MakeCpuBackend();
}

}  // namespace

absl::StatusOr<std::unique_ptr<kernels::Backend>> MakeBackend(const std::string& name) {
  return MakeRankBackend(name, 0);
}

absl::StatusOr<engine::Devices> MakeDevices(const std::string& name, int32_t tp) {
  engine::Devices devices;
  for (int32_t rank = 0; rank < tp; ++rank) {
    // "auto" chose the kind for rank 0; the others follow.
    const std::string kind = rank > 0 && devices[0]->name() == "cpu" ? "cpu" : name;
    auto device = MakeRankBackend(kind, rank);
    if (!device.ok() || (rank > 0 && (*device)->name() != devices[0]->name())) {
      if (rank == 0) return device.status();
      return InvalidArgument("--tp {} with --backend {}: only {} GPUs can be used{}", tp, name, rank,
                             device.ok() ? "" : ": " + MessageOf(device.status()));
    }
    devices.push_back(*std::move(device));
  }
  return devices;
}

absl::StatusOr<std::optional<kernels::DType>> KvTypeFromName(const std::string& name) {
  for (const kernels::DType dtype : {kernels::DType::kF32, kernels::DType::kBF16, kernels::DType::kE4M3}) {
    if (name == kernels::DTypeName(dtype)) return dtype;
  }
  if (name == "auto") return std::optional<kernels::DType>();
  return InvalidArgument("--kv-dtype is '{}', not auto, f32, bf16 or fp8", name);
}

absl::StatusOr<std::shared_ptr<const engine::Model>> LoadModel(
    const ModelSource& source, const std::string& backend, const std::string& kv_dtype, int32_t tp,
    std::function<void(uint64_t done_bytes, uint64_t total_bytes)> on_progress) {
  // Checks the source before looking for a device.
  if (source.dir.empty() == source.random_weights.empty())
    return absl::InvalidArgumentError("give either --model DIR or --random-weights SHAPE");
  engine::RandomModel random;
  std::string dir;
  if (source.random_weights.empty()) {
    SPLICE_ASSIGN_OR_RETURN(
        dir, hub::LocalModelFolder(hub::ModelPlaces::FromEnvironment(), source.dir, hub::FolderUse::kModel));
    SPLICE_ASSIGN_OR_RETURN(const engine::ModelConfig config, engine::LoadModelConfig(dir));
    SPLICE_RETURN_IF_ERROR(engine::ValidateNumRanks(config, tp));
  } else {
    auto parsed = engine::ParseRandomModel(source.random_weights);
    if (!parsed.ok()) return Annotate(parsed.status(), "--random-weights");
    random = *std::move(parsed);
    SPLICE_RETURN_IF_ERROR(engine::ValidateNumRanks(random.config, tp));
  }
  SPLICE_ASSIGN_OR_RETURN(const engine::Devices devices, MakeDevices(backend, tp));
  engine::ModelOptions options;
  options.head_classes = source.head_classes;
  options.recovery_profile = source.recovery_profile;
  SPLICE_ASSIGN_OR_RETURN(options.kv_dtype, KvTypeFromName(kv_dtype));
  options.quantize = engine::QuantizeToFromName(source.quantize);
  options.quantize_activations = source.fp8_activations;
  options.on_progress = std::move(on_progress);
  SPLICE_ASSIGN_OR_RETURN(auto model, source.random_weights.empty()
                                          ? engine::Model::Load(dir, devices, options)
                                          : engine::Model::LoadRandom(random, devices, options));
  LogQuantization(*model);
  return model;
}

}  // namespace spl
