// The `splice` command. Exit codes: 0 done, 1 the work failed (message on stderr), 2 bad usage.
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <vector>

#include "services/base/status.h"
#include "tools/cli/command.h"

namespace spl::cli {
namespace {

constexpr Command (*kCommands[])(CLI::App&) = {
    RegisterTokenize,
};

int Run(const Command& command) {
  const absl::Status status = command.run();
  if (status.ok()) return 0;
  fmt::print(stderr, "splice {}: {}\n", command.app->get_name(), MessageOf(status));
  return 1;
}

int Main(int argc, char** argv) {
  CLI::App root("Splice: LLM serving with separate prefill and decode pools and exact KV reuse", "splice");
  root.require_subcommand(1);
  root.footer("`splice COMMAND --help` explains a command by example.");
  std::vector<Command> commands;
  for (const auto& register_command : kCommands) commands.push_back(register_command(root));
  try {
    root.parse(argc, argv);
  } catch (const CLI::ParseError& error) {  // --help comes here too, with exit code 0
    return root.exit(error) == 0 ? 0 : 2;
  }
  for (const Command& command : commands) {
    if (command.app->parsed()) return Run(command);
  }
  return 2;
}

}  // namespace
}  // namespace spl::cli

int main(int argc, char** argv) {
  try {
    return spl::cli::Main(argc, argv);
  } catch (const std::exception& error) {  // out of memory, or a library's: the work failed
    fmt::print(stderr, "splice: {}\n", error.what());
    return 1;
  }
}
