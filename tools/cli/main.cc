// splice: the all-in-one server and the tools. Every subcommand is in its cmd_<name>.cc.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "services/base/crash_handler.h"
#include "services/base/help_formatter.h"
#include "services/base/log.h"
#include "services/base/open_files.h"
#include "services/base/status.h"
#include "services/base/version.h"
#include "tools/cli/command.h"

namespace {

constexpr int kBadUsage = 2;
constexpr int kInterrupted = 130;  // a shell's code for a program that SIGINT has ended

}  // namespace

int main(int argc, char** argv) {
  spl::InstallCrashHandler(argv[0]);
  spl::RaiseOpenFileLimit();
  CLI::App app(
      "Splice: LLM inference with prefill and decode pools that reuse KV.\n\n"
      "Examples:\n"
      "  splice serve --model models/splice-tiny\n"
      "  splice pull Qwen/Qwen3-8B && splice serve --model Qwen/Qwen3-8B\n"
      "  splice chat  --endpoint http://127.0.0.1:8000",
      "splice");
  app.formatter(spl::MakeHelpFormatter());  // subcommands inherit it
  app.set_version_flag("--version", spl::VersionWithCommit());
  app.require_subcommand(1);
  const std::vector<spl::cli::Command> commands = {
      spl::cli::MakeServeCommand(app),    spl::cli::MakeGenerateCommand(app), spl::cli::MakeChatCommand(app),
      spl::cli::MakeTokenizeCommand(app), spl::cli::MakeLogitsCommand(app),   spl::cli::MakeEvalCommand(app),
      spl::cli::MakeBenchCommand(app),    spl::cli::MakeProfileCommand(app),  spl::cli::MakeKbCommand(app),
      spl::cli::MakeCtlCommand(app),      spl::cli::MakeDoctorCommand(app),   spl::cli::MakePullCommand(app),
      spl::cli::MakeQuantizeCommand(app),
  };
  if (argc == 1) {
    fmt::print("{}", app.help());
    return kBadUsage;
  }
  const bool known = std::any_of(commands.begin(), commands.end(),
                                 [&](const spl::cli::Command& command) { return command.app->get_name() == argv[1]; });
  if (argv[1][0] != '-' && !known) {
    fmt::print(stderr, "splice: there is no command \"{}\"; splice --help lists them\n", argv[1]);
    return kBadUsage;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kBadUsage;
  }
  // A person reads what the command prints; serve has --log-level.
  if (::isatty(STDERR_FILENO) != 0) spl::log::SetLevel(spl::log::Level::kWarning);
  for (const spl::cli::Command& command : commands) {
    if (!command.app->parsed()) continue;
    const absl::Status status = command.run();
    if (status.ok()) return 0;
    fmt::print(stderr, "splice {}: {}\n", command.app->get_name(), spl::MessageOf(status));
    return status.code() == absl::StatusCode::kCancelled ? kInterrupted : 1;
  }
  return kBadUsage;
}
