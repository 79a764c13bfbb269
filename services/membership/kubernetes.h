// Membership from the EndpointSlices that Kubernetes keeps for a Service: those of SERVICE-prefill and SERVICE-decode,
// which the chart creates. Workers do nothing for it, but they must be told to listen on their pod's address.
//
// The slices are listed, then watched from the list's resource version over HTTPS, as the pod's service account. The
// token is read again for every call (it is rotated); the server must have a certificate of the CA for its name. A
// watch ends after a minute at most and is resumed. If its version is gone (410), the slices are listed again. An API
// server that does not answer changes nothing.
//
// Every endpoint that is not terminating is a member, ready or not: the router finds out by itself which ones answer. A
// pod that is told to end gets no more requests, even before its program knows.
#pragma once

#include <string_view>

#include "services/membership/membership.h"

namespace spl::membership {

struct KubernetesOptions {
  std::string api_server;  // HOST:PORT
  std::string token_file = "/var/run/secrets/kubernetes.io/serviceaccount/token";
  std::string ca_file = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt";
  std::string name_space;
  std::string service;             // the roles are separate services: SERVICE-prefill, SERVICE-decode
  std::string port_name = "grpc";  // name of the port in the slices
  std::chrono::milliseconds call_timeout{10'000};
  std::chrono::seconds watch_time{50};  // requested; the client waits this long plus the time limit of a call
  std::chrono::milliseconds retry_pause{1'000};
};

// InvalidArgument: token or CA cannot be read, or api_server is not an address.
absl::StatusOr<std::unique_ptr<Discovery>> MakeKubernetesDiscovery(KubernetesOptions options);

}  // namespace spl::membership
