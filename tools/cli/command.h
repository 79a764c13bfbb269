// A subcommand of `splice`: each is one file cmd_NAME.cc with one function RegisterNAME, listed in main.cc.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

#include "absl/status/status.h"

namespace spl::cli {

struct Command {
  CLI::App* app = nullptr;            // owned by the root app that it was registered with
  std::function<absl::Status()> run;  // called after parsing, if this subcommand was given
};

Command RegisterTokenize(CLI::App& root);

}  // namespace spl::cli
