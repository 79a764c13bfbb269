#include "services/membership/endpoint_slices.h"

#include <nlohmann/json.hpp>
#include <optional>

#include "services/base/address.h"
#include "services/base/status.h"

namespace spl::membership {
namespace {

using nlohmann::json;

// Never throws: a member that is missing or has another type is null.
const json& At(const json& object, const char* key) {
  static const json kNull;
  if (!object.is_object()) return kNull;
  const auto found = object.find(key);
  return found == object.end() ? kNull : *found;
}

std::string TextAt(const json& object, const char* key) {
  const json& value = At(object, key);
  return value.is_string() ? value.get<std::string>() : "";
}

std::string NameOf(const json& slice) { return TextAt(At(slice, "metadata"), "name"); }

std::optional<uint16_t> PortOf(const json& slice, const std::string& name) {
  for (const json& port : At(slice, "ports")) {
    const json& number = At(port, "port");
    const bool is_port = number.is_number_unsigned() && number.get<uint64_t>() > 0 && number.get<uint64_t>() <= 65535;
    if (TextAt(port, "name") == name && is_port) return number.get<uint16_t>();
  }
  return std::nullopt;
}

}  // namespace

absl::Status EndpointSlices::Put(const json& slice) {
  const std::string name = NameOf(slice);
  if (name.empty()) return InvalidArgument("an EndpointSlice without a name");
  std::vector<Endpoint>& endpoints = slices_[name];
  endpoints.clear();
  const std::string service = TextAt(At(At(slice, "metadata"), "labels"), "kubernetes.io/service-name");
  if (service != service_ + "-prefill" && service != service_ + "-decode")
    return InvalidArgument("EndpointSlice '{}' is of service '{}', neither {}-prefill nor {}-decode", name, service,
                           service_, service_);
  const Role role = service == service_ + "-prefill" ? Role::kPrefill : Role::kDecode;
  const std::string type = TextAt(slice, "addressType");
  if (type != "IPv4" && type != "IPv6") return absl::OkStatus();  // FQDN: the service has no pods
  if (At(slice, "endpoints").empty()) return absl::OkStatus();    // a service without pods has no ports either
  const std::optional<uint16_t> port = PortOf(slice, port_name_);
  if (!port.has_value()) return InvalidArgument("EndpointSlice '{}' has no port named '{}'", name, port_name_);
  for (const json& endpoint : At(slice, "endpoints")) {
    if (At(At(endpoint, "conditions"), "terminating") == true) continue;
    const json& addresses = At(endpoint, "addresses");
    if (!addresses.is_array() || addresses.empty() || !addresses[0].is_string()) continue;
    Endpoint& added = endpoints.emplace_back();
    added.member = {.role = role, .address = HostPort{addresses[0].get<std::string>(), *port}.ToString()};
    added.pod = TextAt(At(endpoint, "targetRef"), "name");
    added.ipv6 = type == "IPv6";
  }
  return absl::OkStatus();
}

void EndpointSlices::Remove(const json& slice) { slices_.erase(NameOf(slice)); }

Members EndpointSlices::members() const {
  Members members;
  std::map<std::pair<Role, std::string>, const Endpoint*> by_pod;
  for (const auto& [name, endpoints] : slices_) {
    for (const Endpoint& endpoint : endpoints) {
      if (endpoint.pod.empty()) {
        members.push_back(endpoint.member);
        continue;
      }
      const Endpoint*& best = by_pod[{endpoint.member.role, endpoint.pod}];
      if (best == nullptr || (best->ipv6 && !endpoint.ipv6)) best = &endpoint;
    }
  }
  for (const auto& [pod, endpoint] : by_pod) members.push_back(endpoint->member);
  Normalize(members);
  return members;
}

}  // namespace spl::membership
