// A flag that takes a size: "512MiB", "4GiB", or bytes. Header only, because only programs have CLI11.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

#include "services/base/byte_size.h"
#include "services/base/status.h"

namespace spl {

// Target: uint64_t, whose value is the default shown in the help, or std::optional<uint64_t>. `target` must live as
// long as `app`. A text that is not a size is a parse error, like other wrong values.
template <typename Target>
CLI::Option* AddByteSizeOption(CLI::App& app, const std::string& name, Target& target, std::string help) {
  if constexpr (std::is_same_v<Target, uint64_t>) help += " (default " + FormatByteSize(target) + ")";
  return app.add_option_function<std::string>(
      name,
      [&target, name](const std::string& text) {
        const auto bytes = ParseByteSize(text);
        if (!bytes.ok()) throw CLI::ValidationError(name, MessageOf(bytes.status()));
        target = *bytes;
      },
      help);
}

// The same for a size that the program chooses itself when it is "auto", the default: `target` is nullopt then.
inline CLI::Option* AddByteSizeOrAutoOption(CLI::App& app, const std::string& name, std::optional<uint64_t>& target,
                                            const std::string& help) {
  const std::string shown = target.has_value() ? FormatByteSize(*target) : "auto";
  return app.add_option_function<std::string>(
      name,
      [&target, name](const std::string& text) {
        target.reset();
        if (text == "auto") return;
        const auto bytes = ParseByteSize(text);
        if (!bytes.ok()) throw CLI::ValidationError(name, MessageOf(bytes.status()) + ", or auto");
        target = *bytes;
      },
      help + " (default " + shown + ")");
}

}  // namespace spl
