// Membership from the EndpointSlices that Kubernetes keeps of a Service: those of SERVICE-prefill and SERVICE-decode,
// which is what the chart makes. Workers do nothing for it; they must be told to listen on their pod's address.
//
// The slices are listed, then watched from the list's resource version over HTTPS, as the service account of the pod:
// the token is read again for every call (it is rotated), the server must have a certificate of the CA for its name. A
// watch ends after a minute at most and is resumed; a version that is gone (410) is listed anew. An API server that
// does not answer changes nothing.
//
// A member is every endpoint that is not terminating, ready or not: the router sees by itself who answers, and a pod
// that is told to end stops to get requests before its program knows.
#pragma once

#include <string_view>

#include "services/membership/membership.h"

namespace spl::membership {

struct KubernetesOptions {
  std::string api_server;  // HOST:PORT
  std::string token_file = "/var/run/secrets/kubernetes.io/serviceaccount/token";
  std::string ca_file = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt";
  std::string name_space;
  std::string service;             // roles are behind it: SERVICE-prefill, SERVICE-decode
  std::string port_name = "grpc";  // of the slices' ports
  std::chrono::milliseconds call_timeout{10'000};
  std::chrono::seconds watch_time{50};  // asked for; the client waits as long again as a call may take
  std::chrono::milliseconds retry_pause{1'000};
};

// InvalidArgument: token or CA cannot be read, or api_server is no address.
absl::StatusOr<std::unique_ptr<Discovery>> MakeKubernetesDiscovery(KubernetesOptions options);

}  // namespace spl::membership
