// One subcommand of `splice`: its name and flags (app), and the function that runs it.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

#include "absl/status/status.h"

namespace spl::cli {

// Exit codes: 0: OK; 2: InvalidArgument from flags (bad usage); 130: Cancelled (Ctrl-C); 1: any other failure.
struct Command {
  CLI::App* app = nullptr;
  std::function<absl::Status()> run;
};

// Each function is in its own cmd_<name>.cc. It adds a subcommand to `root`; the returned object keeps the flags alive.
Command MakeServeCommand(CLI::App& root);
Command MakeGenerateCommand(CLI::App& root);
Command MakeChatCommand(CLI::App& root);
Command MakeTokenizeCommand(CLI::App& root);
Command MakeLogitsCommand(CLI::App& root);
Command MakeEvalCommand(CLI::App& root);
Command MakeBenchCommand(CLI::App& root);
Command MakeProfileCommand(CLI::App& root);
Command MakeKbCommand(CLI::App& root);
Command MakeCtlCommand(CLI::App& root);
Command MakeDoctorCommand(CLI::App& root);
Command MakePullCommand(CLI::App& root);
Command MakeQuantizeCommand(CLI::App& root);

}  // namespace spl::cli
