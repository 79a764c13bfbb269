// Command-line flags that the two worker programs share, and the frame of their main.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "services/base/fault_point.h"
#include "services/base/help_formatter.h"
#include "services/base/log.h"
#include "services/base/otlp_exporter.h"
#include "services/base/shutdown_signal.h"
#include "services/base/status.h"
#include "services/base/tls.h"
#include "services/base/version.h"
#include "services/engine/engine.h"
#include "services/engine/runtime/step_turns.h"
#include "services/membership/membership_flags.h"
#include "services/transport/kv_transport.h"
#include "services/worker_flags/load_status.h"

namespace spl {

// The model that a program runs; set exactly one of dir and random_weights.
struct ModelSource {
  std::string dir;                        // Hugging Face folder, or ORG/NAME of a model on this machine
  std::string random_weights;             // "SHAPE[:SEED]", see services/engine/model/random_weights.h
  std::string head_classes = "auto";      // ModelOptions::head_classes
  std::string recovery_profile = "auto";  // ModelOptions::recovery_profile
  std::string quantize = "none";          // "none", "fp8" or "int4", ModelOptions::quantize
  bool fp8_activations = true;            // ModelOptions::quantize_activations
};

inline constexpr char kKvDtypeHelp[] =
    "type of cached K and V: auto (as the weights: f32 or bf16), f32, bf16 or fp8; the same for all workers";

inline constexpr char kNoAsyncSchedulingHelp[] =
    "GPU only: start a decode step after the tokens of the step before it are known; slower, for comparison";

inline constexpr char kQualityShareHelp[] =
    "share of the requests with a number as quality that are computed both exactly and by their method, so that there "
    "is "
    "a record; 0: all of them are exact";
inline constexpr char kNoStepCostsHelp[] =
    "GPU only: do not measure at start what decode steps cost; the decode method adaptive then decides by a built-in "
    "rule";

inline constexpr char kHostTierBytesHelp[] =
    "page-locked host memory for the KV of requests with the decode method sparcas, where keys are packed (on Hopper "
    "GPUs): the device keeps what they choose by and what they chose lately. 0: everything stays on the device";

struct WorkerFlags {
  ModelSource model;
  std::string listen = "127.0.0.1:0";
  std::string metrics_listen = "127.0.0.1:0";
  std::string advertise;  // host for peers and routers; empty: that of listen
  std::string worker_id;
  bool vllm_metric_names = false;
  std::string served_model_name;  // empty: the model's own name
  membership::MembershipFlags membership;
  PeerTlsOptions tls_files;
  TraceOptions trace;
  std::shared_ptr<const PeerTls> tls;  // loaded by RunWorker from the flags
  std::string backend = "auto";
  std::string kv_dtype = "auto";
  std::string log_level = "info";
  std::string store;  // HOST:PORT[,HOST:PORT…] of splice-kvstores
  std::vector<std::string> faults;
  int32_t tp = 1;
  std::optional<uint64_t> kv_bytes;  // for all ranks together; nullopt: auto, which RunWorker replaces by a size
  int32_t num_threads = 0;
  int32_t max_sequences = 0;                 // decode only; 0: by device, which RunWorker fills in (worker_defaults.h)
  bool no_async_scheduling = false;          // decode only
  bool no_step_costs = false;                // decode only
  uint32_t local_prefill_tokens = 0;         // decode only
  uint64_t parked_bytes = 4ull << 30;        // decode only
  uint64_t host_tier_bytes = 0;              // decode only: engine::HostTierOptions::bytes
  int32_t local_prefill_slice_tokens = 128;  // decode only
  int64_t itl_target_ms = engine::StepTurns::kDefaultItlTarget.count();  // decode only, where prompts are computed, too
  double fidelity_share = 0.01;
  double quality_share = 0.05;  // for requests with a contract; prefill
  double session_share = 0.5;
  double session_lease_s = 600;
  std::chrono::milliseconds session_lease() const {
    return std::chrono::milliseconds(static_cast<int64_t>(session_lease_s * 1e3));
  }
  std::string fetch = "cost";         // "cost" or "always", engine::PrefillEngineOptions::fetch_by_cost
  bool quantized_copies = true;       // prefill only
  int32_t slice_tokens = 0;           // prefill only; 0: as max_sequences
  std::string kv_transport = "auto";  // auto, device, shm, tcp
  double kv_min_gb_per_s = 0;         // prefill only
  // With a GPU: staging memory (prefill) or landing memory (decode). nullopt: auto, which is the program's to size.
  std::optional<uint64_t> host_kv_bytes;
  transport::TransportOptions transport;
};

// The model_name of metrics under vLLM's names; empty without --vllm-metric-names.
std::string VllmModelName(const WorkerFlags& flags, const engine::Model& model);

enum class WorkerRole { kPrefill, kDecode };

// Adds the flags that both programs have and those of one role.
void AddWorkerFlags(CLI::App& app, WorkerRole role, WorkerFlags& flags);

inline constexpr char kLocalModelHelp[] =
    "Hugging Face model folder, or ORG/NAME[@REVISION] of a model that splice pull has fetched";
// Adds --model and --random-weights to an app, or to a group that has further sources. `model_help`: what --model
// takes.
void AddModelSourceFlags(CLI::App& app, ModelSource& source, const char* model_help = kLocalModelHelp);
void AddHeadClassesFlag(CLI::App& app, ModelSource& source);
void AddQuantizeFlag(CLI::App& app, ModelSource& source);
// Adds --model and --random-weights as a group, of which exactly one must be given, --head-classes and --quantize.
void RequireModelSource(CLI::App& app, ModelSource& source, const char* model_help = kLocalModelHelp);

// auto: the value of SPLICE_BACKEND, otherwise the first usable GPU, otherwise the CPU (the log says why). cpu, cuda,
// cuda:N: that one, or an error. cuda+deterministic: a row's result does not depend on the rest of its batch, as on the
// CPU; slower.
absl::StatusOr<std::unique_ptr<kernels::Backend>> MakeBackend(const std::string& name);
// Devices for `tp` ranks: the CPU `tp` times, or GPUs N to N + tp - 1. InvalidArgument: there are fewer.
absl::StatusOr<engine::Devices> MakeDevices(const std::string& name, int32_t tp);

// InvalidArgument: --discovery is malformed, or no other program could reach the addresses of --listen and --advertise.
absl::Status CheckAddresses(const WorkerFlags& flags);

// Sets what both kinds of worker take over from their flags.
template <typename Options>
void TakeCommonFlags(const WorkerFlags& flags, const engine::Model& model, Options& options) {
  options.listen = flags.listen;
  options.metrics_listen = flags.metrics_listen;
  options.vllm_model_name = VllmModelName(flags, model);
  options.tls = flags.tls;
  options.trace = flags.trace;
  options.worker_id = flags.worker_id;
  options.advertise = flags.advertise;
  options.join = [membership = flags.membership](const membership::Member& member) {
    return membership.MakeRegistration(member);
  };
  options.kv_bytes = *flags.kv_bytes;
  options.transport = flags.transport;
}

// The value of --kv-dtype: f32, bf16, fp8; none for auto.
absl::StatusOr<std::optional<kernels::DType>> KvTypeFromName(const std::string& name);

// Makes the backend by name and loads the model from its source; fetches nothing. InvalidArgument names the flag or
// file; NotFound and FailedPrecondition name a file that is not there, and the command that fetches it. `kv_dtype`: the
// value of --kv-dtype. `on_progress`: ModelOptions::on_progress.
absl::StatusOr<std::shared_ptr<const engine::Model>> LoadModel(
    const ModelSource& source, const std::string& backend, const std::string& kv_dtype, int32_t tp = 1,
    std::function<void(uint64_t done_bytes, uint64_t total_bytes)> on_progress = nullptr);

// Fills in the numbers that depend on the model's device, where the operator gave none.
void FillDefaults(const engine::Model& model, WorkerFlags& flags);
// Gives flags.kv_bytes a size (SizeKvPools) where it is auto. Needs FillDefaults.
absl::Status SizeKvPool(WorkerRole role, const engine::Model& model, WorkerFlags& flags);

// Parses flags, loads the model, starts the server, prints "ready grpc=… metrics=…", waits for the end, and stops.
// Exit codes: 0 done, 1 the work failed (message on stderr), 2 bad usage.
template <typename StartServer>
int RunWorker(int argc, char** argv, ShutdownSignal& stop, WorkerRole role, const std::string& name,
              const std::string& summary, const std::string& example, StartServer start) {
  WorkerFlags flags;
  CLI::App app(summary + "\n\nExample:\n" + example, name);
  app.formatter(MakeHelpFormatter());
  app.set_version_flag("--version", VersionWithCommit());
  AddWorkerFlags(app, role, flags);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  const auto fail = [&](const absl::Status& status) {
    fmt::print(stderr, "{}: {}\n", name, MessageOf(status));
    return 1;
  };
  if (const absl::Status status = log::SetLevel(flags.log_level); !status.ok()) return fail(status);
  for (const std::string& fault : flags.faults) {
    if (const absl::Status status = ArmFaultFromFlag(fault); !status.ok()) return fail(status);
  }
  if (const absl::Status status = CheckAddresses(flags); !status.ok()) return fail(status);
  auto tls = PeerTls::Load(flags.tls_files);
  if (!tls.ok()) return fail(tls.status());
  flags.tls = *std::move(tls);
  auto loading = LoadStatus::Start(flags.metrics_listen);
  if (!loading.ok()) return fail(Annotate(loading.status(), "--metrics-listen"));
  auto model = LoadModel(flags.model, flags.backend, flags.kv_dtype, flags.tp, (*loading)->Reporter());
  if (!model.ok()) return fail(model.status());
  FillDefaults(**model, flags);
  if (const absl::Status status = SizeKvPool(role, **model, flags); !status.ok()) return fail(status);
  (*loading)->Stop();
  auto server = start(flags, std::move(*model));
  if (!server.ok()) return fail(server.status());
  fmt::print("ready grpc={} metrics={}\n", (*server)->grpc_address(), (*server)->metrics_address());
  std::fflush(stdout);
  stop.Wait();
  (*server)->Stop();
  return 0;
}

}  // namespace spl
