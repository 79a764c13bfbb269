// Adds the flag --generation-config. Header only, because only programs link CLI11.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace spl::router {

inline void AddGenerationConfigFlag(CLI::App& app, std::string& target) {
  app.add_option("--generation-config", target,
                 "default sampling parameters: auto (the model's generation_config.json) or none (temperature 1, no "
                 "truncation)")
      ->check(CLI::IsMember({"auto", "none"}))
      ->capture_default_str();
}

}  // namespace spl::router
