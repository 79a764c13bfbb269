// EndpointSlices of the Kubernetes API (discovery.k8s.io/v1) as members, without the network.
#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <utility>

#include "services/membership/membership.h"

namespace spl::membership {

// The slices of the two services, built from lists and watch events. Used by one thread.
class EndpointSlices {
 public:
  EndpointSlices(std::string service, std::string port_name)
      : service_(std::move(service)), port_name_(std::move(port_name)) {}

  // Takes over the slices of another object for the same service.
  void Replace(EndpointSlices&& other) { slices_ = std::move(other.slices_); }
  // Adds or replaces an object of kind EndpointSlice. InvalidArgument says what it lacks; it then counts as empty.
  absl::Status Put(const nlohmann::json& slice);
  void Remove(const nlohmann::json& slice);
  // Returns the members. A pod that is in slices of both address types is one member, by its IPv4 address.
  Members members() const;

 private:
  struct Endpoint {
    Member member;
    std::string pod;  // empty: unknown
    bool ipv6 = false;
  };

  const std::string service_;
  const std::string port_name_;
  std::map<std::string, std::vector<Endpoint>> slices_;  // by name
};

}  // namespace spl::membership
