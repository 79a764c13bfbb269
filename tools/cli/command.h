// One subcommand of `splice`: what it is called, its flags, and what runs when it is chosen.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

#include "absl/status/status.h"

namespace spl::cli {

// Exit codes: 0 for OK, 2 for InvalidArgument raised by flags (bad usage), 1 for any other failure.
struct Command {
  CLI::App* app = nullptr;
  std::function<absl::Status()> run;
};

// Each in its own cmd_<name>.cc. They add a subcommand to `root` and keep their flags alive in the returned object.
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

}  // namespace spl::cli
