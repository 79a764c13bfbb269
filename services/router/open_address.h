// Whether the public APIs may listen where they were told to.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace spl::router {

struct OpenAddresses {
  std::string http_listen, grpc_listen;  // HOST:PORT
  bool has_keys = false;
  bool insecure_open = false;  // --insecure-open
};

// InvalidArgument: an address is not loopback, there are no keys, and nobody has said that it shall be so. Cheap: for
// the start of a program, before models are loaded.
absl::Status CheckOpenAddresses(const OpenAddresses& addresses);

}  // namespace spl::router
