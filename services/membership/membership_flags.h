// --discovery and what belongs to it, for routers and workers alike.
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
  // Of Kubernetes. Empty: where Kubernetes tells pods that its API is (KUBERNETES_SERVICE_HOST, …_PORT).
  std::string kubernetes_api;
  std::string kubernetes_credentials = "/var/run/secrets/kubernetes.io/serviceaccount";

  void Register(CLI::App& app);

  // Null for "static". InvalidArgument: the flag says something else, or Kubernetes' or etcd's credentials cannot be
  // read.
  absl::StatusOr<std::shared_ptr<Discovery>> MakeDiscovery() const;
  // Puts a worker on the list, which only etcd needs: null for the others.
  absl::StatusOr<std::unique_ptr<Registration>> MakeRegistration(const Member& member) const;
};

}  // namespace spl::membership
