// A server that a tool calls, from the tool's flags.
#pragma once

#include <CLI/App.hpp>
#include <string>

namespace spl::cli {

inline constexpr char kCaFlag[] = "--ca";

struct Endpoint {
  std::string url;
  std::string api_key;              // bearer token; empty: none is sent
  std::string ca_file;              // with TLS: CAs of the server's certificate; empty: the system's
  std::string flag = "--endpoint";  // flag that gave `url`, for messages
};

inline void AddCaFlag(CLI::App& app, std::string& ca_file) {
  app.add_option(
         kCaFlag, ca_file,
         "CA certificates (PEM) for https:// and grpcs:// servers (default: the system's); also from SPLICE_CA_FILE")
      ->envname("SPLICE_CA_FILE")
      ->type_name("FILE");
}

}  // namespace spl::cli
