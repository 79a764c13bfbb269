// splice-prefill: see services/prefill/prefill_server.h.
#include "services/base/crash_handler.h"
#include "services/base/open_files.h"
#include "services/base/shutdown_signal.h"
#include "services/prefill/prefill_server.h"
#include "services/worker_flags/worker_defaults.h"
#include "services/worker_flags/worker_flags.h"
#include "services/worker_flags/worker_grammars.h"

int main(int argc, char** argv) {
  spl::InstallCrashHandler(argv[0]);
  spl::RaiseOpenFileLimit();
  spl::ShutdownSignal stop;  // before any thread
  return spl::RunWorker(
      argc, argv, stop, spl::WorkerRole::kPrefill, "splice-prefill",
      "Prefills: computes prompts and pushes their KV to decode workers.",
      "  splice-prefill --model models/splice-tiny --listen 127.0.0.1:7101 --kv-bytes 2GiB --store 127.0.0.1:7103\n",
      [](const spl::WorkerFlags& flags, std::shared_ptr<const spl::engine::Model> model) {
        spl::prefill::PrefillServerOptions options;
        spl::TakeCommonFlags(flags, *model, options);
        options.store_address = flags.store;
        options.engine.executor.num_threads = flags.num_threads;
        options.engine.executor.max_rows = flags.slice_tokens;
        options.engine.max_concurrent = spl::DefaultsOf(model->backend().host_memory()).prompts_at_once;
        options.fidelity = {flags.fidelity_share, flags.quality_share};
        options.engine.session_share = flags.session_share;
        options.engine.fetch_by_cost = flags.fetch == "cost";
        options.engine.quantize_published = flags.quantized_copies;
        options.engine.session_lease = flags.session_lease();
        options.staging_bytes = flags.host_kv_bytes.value_or(uint64_t{256} << 20);
        options.min_transfer_bytes_per_s = flags.kv_min_gb_per_s * 1e9;
        options.SetKvTransport(flags.kv_transport);
        options.grammars = spl::MakeWorkerGrammars(flags.model.dir, *model);
        return spl::prefill::PrefillServer::Start(std::move(model), options);
      });
}
