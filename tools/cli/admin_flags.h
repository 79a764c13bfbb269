// The flags --url, --api-key, --ca and --json of the commands that call the admin API.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "services/base/http_url.h"
#include "services/base/status.h"
#include "tools/cli/api_client.h"

namespace spl::cli {

struct AdminFlags {
  std::string url = "http://127.0.0.1:8000";
  std::string api_key;
  std::string ca_file;
  bool json = false;

  // Adds the flags to a subcommand, before or behind its other arguments.
  void Register(CLI::App& app) {
    app.add_option("--url", url, "the router's HTTP API")->capture_default_str();
    app.add_option("--api-key", api_key, "bearer token; also from SPLICE_API_KEY")->envname("SPLICE_API_KEY");
    AddCaFlag(app, ca_file);
    app.add_flag("--json", json, "print the server's answer as it is");
  }
  absl::StatusOr<std::unique_ptr<ApiClient>> Connect() const {
    return ApiClient::Create({.url = url, .api_key = api_key, .ca_file = ca_file, .flag = "--url"});
  }
  // Prints the server's answer if --json was given. True: it did.
  bool PrintedJson(const nlohmann::json& answer) const {
    if (json) fmt::print("{}\n", answer.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
    return json;
  }
};

}  // namespace spl::cli
