// splice-router: flags around RouterServer.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>

#include "services/base/crash_handler.h"
#include "services/base/help_formatter.h"
#include "services/base/log.h"
#include "services/base/open_files.h"
#include "services/base/shutdown_signal.h"
#include "services/base/status.h"
#include "services/hub/model_places.h"
#include "services/router/router_flags.h"
#include "services/router/router_server.h"

int main(int argc, char** argv) {
  spl::InstallCrashHandler(argv[0]);
  spl::RaiseOpenFileLimit();
  CLI::App app("splice-router: the front door of a Splice cluster (OpenAI-compatible HTTP and gRPC)");
  app.formatter(spl::MakeHelpFormatter());
  app.footer(
      "Example:\n"
      "  splice-router --model models/splice-tiny --prefill 127.0.0.1:7101 --decode 127.0.0.1:7102 --http "
      "127.0.0.1:8000\n"
      "  curl http://127.0.0.1:8000/v1/chat/completions -d "
      "'{\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}]}'");
  spl::router::RouterFlags flags;
  flags.Register(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  const absl::Status log_level = spl::log::SetLevel(flags.log_level);
  absl::StatusOr<spl::router::RouterOptions> options = flags.ToOptions();
  if (!log_level.ok() || !options.ok()) {
    fmt::print(stderr, "splice-router: {}\n", spl::MessageOf(log_level.ok() ? options.status() : log_level));
    return 2;
  }
  auto model_dir = spl::hub::LocalModelFolder(spl::hub::ModelPlaces::FromEnvironment(), options->model_dir,
                                              spl::hub::FolderUse::kTextOnly);
  if (!model_dir.ok()) {
    fmt::print(stderr, "splice-router: {}\n", spl::MessageOf(model_dir.status()));
    return 1;
  }
  options->model_dir = *std::move(model_dir);
  spl::ShutdownSignal shutdown;  // before any thread exists
  auto server = spl::router::RouterServer::Start(*std::move(options));
  if (!server.ok()) {
    fmt::print(stderr, "splice-router: {}\n", spl::MessageOf(server.status()));
    return 1;
  }
  fmt::print("{}\n", spl::router::ReadyLine(**server));
  std::fflush(stdout);
  shutdown.Wait();
  (*server)->Stop();
  return 0;
}
