// --discovery and its related flags, for routers and workers.
#pragma once

#include <CLI/App.hpp>
#include <memory>
#include <string>

#include "services/membership/etcd_access.h"
#include "services/membership/membership.h"

namespace spl::membership {

struct MembershipFlags {
  std::string discovery = "static";
  uint32_t lease_seconds = 5;
  EtcdAccessOptions etcd;
  // Address of the Kubernetes API. Empty: the address that Kubernetes gives to pods (KUBERNETES_SERVICE_HOST, …_PORT).
  std::string kubernetes_api;
  std::string kubernetes_credentials = "/var/run/secrets/kubernetes.io/serviceaccount";

  void Register(CLI::App& app);

  // Null: "static". InvalidArgument: the flag is malformed, or the credentials of Kubernetes or etcd cannot be read.
  absl::StatusOr<std::shared_ptr<Discovery>> MakeDiscovery() const;
  // Registers a worker. Null: the back end needs no registration (only etcd does).
  absl::StatusOr<std::unique_ptr<Registration>> MakeRegistration(const Member& member) const;
};

}  // namespace spl::membership
