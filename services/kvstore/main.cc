// splice-kvstore: flags, start, wait for a signal, stop.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "services/base/byte_size_option.h"
#include "services/base/crash_handler.h"
#include "services/base/fault_point.h"
#include "services/base/help_formatter.h"
#include "services/base/log.h"
#include "services/base/open_files.h"
#include "services/base/shutdown_signal.h"
#include "services/base/status.h"
#include "services/base/version.h"
#include "services/kvstore/kvstore_server.h"

namespace {

absl::Status Serve(const spl::kvstore::KvStoreOptions& options, spl::ShutdownSignal& stop) {
  SPLICE_ASSIGN_OR_RETURN(const auto server, spl::kvstore::KvStoreServer::Start(options));
  std::printf("ready grpc=%s metrics=%s\n", server->grpc_address().c_str(), server->metrics_address().c_str());
  std::fflush(stdout);
  stop.Wait();
  server->Stop();
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  spl::InstallCrashHandler(argv[0]);
  spl::RaiseOpenFileLimit();
  spl::ShutdownSignal stop;
  spl::kvstore::KvStoreOptions options;
  options.listen = "127.0.0.1:7103";
  options.metrics_listen = "127.0.0.1:9103";
  std::string log_level = "info";
  std::vector<std::string> faults;
  spl::PeerTlsOptions tls;
  CLI::App app("Keeps chunks of KV cache for the prefill workers, in memory and on disk.", "splice-kvstore");
  app.formatter(spl::MakeHelpFormatter());
  app.set_version_flag("--version", spl::VersionWithCommit());
  app.footer(
      "Example:\n  splice-kvstore --listen 0.0.0.0:7103 --data-dir /var/lib/splice --memory-bytes 8GiB --disk-bytes "
      "200GiB");
  app.add_option("--listen", options.listen, "gRPC address HOST:PORT; port 0 picks a free one")->capture_default_str();
  app.add_option("--metrics-listen", options.metrics_listen, "HTTP address of /metrics, /healthz and /readyz")
      ->capture_default_str();
  tls.Register(app);
  options.trace.Register(app);
  app.add_option("--data-dir", options.data_dir, "directory of the disk tier; without it chunks live in memory only");
  spl::AddByteSizeOption(app, "--memory-bytes", options.memory_bytes, "memory tier, for example 512MiB");
  spl::AddByteSizeOption(app, "--disk-bytes", options.disk_bytes, "disk tier");
  app.add_flag("--reset-damaged-index", options.reset_damaged_index,
               "start with an empty index if the index is damaged: without chunks, namespaces and records; the damaged "
               "file is kept");
  app.add_option("--high-watermark", options.high_watermark, "share of a tier that triggers eviction")
      ->capture_default_str();
  app.add_option("--low-watermark", options.low_watermark, "share that eviction leaves in use")->capture_default_str();
  options.kv_transport = "auto";
  app.add_option(
         "--kv-transport", options.kv_transport,
         "how workers read and write the memory tier: shm, tcp, auto (the fastest that works), or none: as gRPC "
         "streams only")
      ->check(CLI::IsMember({"auto", "shm", "tcp", "none"}))
      ->capture_default_str();
  app.add_option("--kv-listen-host", options.kv_listen_host, "address that the KV transport listens on and peers reach")
      ->capture_default_str();
  app.add_option("--log-level", log_level, "debug, info, warning, error or off")->capture_default_str();
  app.add_option("--fault", faults)->group("");  // for tests
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  absl::Status usage = spl::log::SetLevel(log_level);
  for (const std::string& fault : faults) usage.Update(spl::ArmFaultFromFlag(fault));
  auto peer_tls = spl::PeerTls::Load(tls);
  usage.Update(peer_tls.status());
  if (!usage.ok()) {
    std::fprintf(stderr, "splice-kvstore: %s\n", spl::MessageOf(usage).c_str());
    return 2;
  }
  options.tls = *std::move(peer_tls);
  if (const absl::Status status = Serve(options, stop); !status.ok()) {
    std::fprintf(stderr, "splice-kvstore: %s\n", spl::MessageOf(status).c_str());
    return 1;
  }
  return 0;
}
