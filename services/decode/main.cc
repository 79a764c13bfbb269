// splice-decode: see services/decode/decode_server.h.
#include "services/base/crash_handler.h"
#include "services/base/open_files.h"
#include "services/base/shutdown_signal.h"
#include "services/decode/decode_server.h"
#include "services/worker_flags/worker_flags.h"
#include "services/worker_flags/worker_grammars.h"

int main(int argc, char** argv) {
  spl::InstallCrashHandler(argv[0]);
  spl::RaiseOpenFileLimit();
  spl::ShutdownSignal stop;  // before any thread
  return spl::RunWorker(argc, argv, stop, spl::WorkerRole::kDecode, "splice-decode",
                        "Decodes: takes the KV of prompts that prefill workers push and streams tokens.",
                        "  splice-decode --model models/splice-tiny --listen 127.0.0.1:7102 --kv-bytes 2GiB\n",
                        [](const spl::WorkerFlags& flags, std::shared_ptr<const spl::engine::Model> model) {
                          spl::decode::DecodeServerOptions options;
                          spl::TakeCommonFlags(flags, *model, options);
                          options.local_prefill.max_new_tokens = flags.local_prefill_tokens;
                          options.itl_target = std::chrono::milliseconds(flags.itl_target_ms);
                          options.local_prefill.slice_tokens = flags.local_prefill_slice_tokens;
                          options.local_prefill.num_threads = flags.num_threads;
                          options.local_prefill.store_address = flags.store;
                          options.local_prefill.fetch_by_cost = flags.fetch == "cost";
                          options.sessions.share = flags.session_share;
                          options.sessions.lease = flags.session_lease();
                          options.local_prefill.session_share = flags.session_share;
                          options.local_prefill.session_lease = flags.session_lease();
                          options.engine.executor.num_threads = flags.num_threads;
                          options.engine.parked_bytes = flags.parked_bytes;
                          options.engine.host_tier.bytes = flags.host_tier_bytes;
                          options.engine.fidelity.share = flags.fidelity_share;
                          options.engine.executor.max_rows = flags.max_sequences;
                          if (flags.no_async_scheduling) options.engine.async_scheduling = false;
                          if (flags.no_step_costs) options.engine.measure_step_costs = false;
                          options.transport.carriers = flags.kv_transport == "device" ? "auto" : flags.kv_transport;
                          options.landing_bytes = flags.host_kv_bytes;
                          options.service.grammars = spl::MakeWorkerGrammars(flags.model.dir, *model);
                          options.local_prefill.grammars = options.service.grammars;
                          return spl::decode::DecodeServer::Start(std::move(model), options);
                        });
}
