// Checks whether the public APIs may listen on the configured addresses.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace spl::router {

struct OpenAddresses {
  std::string http_listen, grpc_listen;  // HOST:PORT
  bool has_keys = false;
  bool insecure_open = false;  // --insecure-open
};

// InvalidArgument: an address is not loopback, there are no keys, and insecure_open is not set. Cheap: call it at the
// start of a program, before models are loaded.
absl::Status CheckOpenAddresses(const OpenAddresses& addresses);

}  // namespace spl::router
