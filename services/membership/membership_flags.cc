#include "services/membership/membership_flags.h"

#include <CLI/CLI.hpp>
#include <cstdlib>

#include "services/base/address.h"
#include "services/base/status.h"
#include "services/membership/etcd.h"
#include "services/membership/kubernetes.h"

namespace spl::membership {
namespace {

EtcdOptions EtcdOptionsOf(const Spec& spec, uint32_t lease_seconds, const EtcdAccessOptions& access) {
  EtcdOptions options;
  options.access = access;
  options.endpoints = spec.endpoints;
  options.prefix = spec.prefix;
  options.lease_ttl = std::chrono::seconds(lease_seconds);
  // Long enough for every worker to notice that its lease is gone, and to make another one.
  options.absent_grace = 2 * options.lease_ttl;
  return options;
}

}  // namespace

void MembershipFlags::Register(CLI::App& app) {
  app.add_option("--discovery", discovery,
                 "Where the list of workers is: static (on the routers' command line), "
                 "etcd://HOST:PORT[,HOST:PORT...][/PREFIX], or kubernetes://NAMESPACE/SERVICE (the endpoints of "
                 "SERVICE-prefill and SERVICE-decode)")
      ->capture_default_str();
  app.add_option("--lease-seconds", lease_seconds,
                 "With etcd: seconds after which a worker that does not renew its entry is removed from the list")
      ->check(CLI::Range(2, 3600))
      ->capture_default_str();
  etcd.Register(app);
  app.add_option("--kubernetes-api", kubernetes_api, "HOST:PORT of the API server, outside of a pod");
  app.add_option("--kubernetes-credentials", kubernetes_credentials, "Folder with token and ca.crt")
      ->type_name("DIR")
      ->capture_default_str();
}

absl::StatusOr<std::shared_ptr<Discovery>> MembershipFlags::MakeDiscovery() const {
  const auto spec = ParseSpec(discovery);
  if (!spec.ok()) return Annotate(spec.status(), "--discovery");
  if (spec->kind == Spec::Kind::kStatic) return std::shared_ptr<Discovery>();
  if (spec->kind == Spec::Kind::kEtcd) {
    SPLICE_RETURN_IF_ERROR(etcd.Check());
    return std::shared_ptr<Discovery>(MakeEtcdDiscovery(EtcdOptionsOf(*spec, lease_seconds, etcd)));
  }
  KubernetesOptions options;
  options.name_space = spec->name_space;
  options.service = spec->service;
  options.api_server = kubernetes_api;
  options.token_file = kubernetes_credentials + "/token";
  options.ca_file = kubernetes_credentials + "/ca.crt";
  if (options.api_server.empty()) {
    const char *host = std::getenv("KUBERNETES_SERVICE_HOST"), *port = std::getenv("KUBERNETES_SERVICE_PORT");
    if (host == nullptr || port == nullptr)
      return InvalidArgument("--discovery {}: this is no pod of Kubernetes; give --kubernetes-api", discovery);
    options.api_server = (std::string(host).find(':') == std::string::npos ? host : "[" + std::string(host) + "]") +
                         ":" + std::string(port);
  }
  auto made = MakeKubernetesDiscovery(std::move(options));
  if (!made.ok()) return Annotate(made.status(), "--discovery " + discovery);
  return std::shared_ptr<Discovery>(*std::move(made));
}

absl::StatusOr<std::unique_ptr<Registration>> MembershipFlags::MakeRegistration(const Member& member) const {
  const auto spec = ParseSpec(discovery);
  if (!spec.ok()) return Annotate(spec.status(), "--discovery");
  if (spec->kind != Spec::Kind::kEtcd) return std::unique_ptr<Registration>();
  if (member.worker_id.find('/') != std::string::npos)
    return InvalidArgument("--worker-id '{}' has a slash; it is part of a key in etcd", member.worker_id);
  SPLICE_RETURN_IF_ERROR(etcd.Check());
  return MakeEtcdRegistration(EtcdOptionsOf(*spec, lease_seconds, etcd), member);
}

}  // namespace spl::membership
