#include "services/router/open_address.h"

#include "services/base/address.h"
#include "services/base/status.h"

namespace spl::router {

absl::Status CheckOpenAddresses(const OpenAddresses& addresses) {
  if (addresses.has_keys || addresses.insecure_open) return absl::OkStatus();
  for (const std::string& address : {addresses.http_listen, addresses.grpc_listen}) {
    if (IsLoopback(address)) continue;
    return InvalidArgument(
        "{} is not loopback, and without --api-keys everybody who reaches it may use the cluster: give a file of keys, "
        "or --insecure-open if that is what you want",
        address);
  }
  return absl::OkStatus();
}

}  // namespace spl::router
