// A flag that takes a size: "512MiB", "4GiB", or bytes.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "services/base/byte_size.h"
#include "services/base/status.h"

namespace spl::cli {

// What `target` holds is the default, and is named in the help. `name` and `target` live as long as `app`.
inline void AddBytes(CLI::App& app, const char* name, uint64_t& target, const std::string& help) {
  app.add_option_function<std::string>(
      name,
      [&target, name](const std::string& text) {
        const auto bytes = ParseByteSize(text);
        if (!bytes.ok()) throw CLI::ValidationError(name, MessageOf(bytes.status()));
        target = *bytes;
      },
      help + " (default " + FormatByteSize(target) + ")");
}

}  // namespace spl::cli
