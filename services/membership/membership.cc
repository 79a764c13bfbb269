#include "services/membership/membership.h"

#include <algorithm>
#include <tuple>

#include "services/base/address.h"
#include "services/base/status.h"

namespace spl::membership {
namespace {

constexpr size_t kMaxEndpoints = 16;

// True for a DNS label; the names become part of a URL.
bool IsLabel(const std::string& text) {
  if (text.empty() || text.size() > 63) return false;
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-'; });
}

absl::StatusOr<Spec> ParseEtcd(const std::string& text, const std::string& rest) {
  Spec spec{.kind = Spec::Kind::kEtcd, .prefix = "/splice"};
  const size_t slash = rest.find('/');
  const std::string hosts = rest.substr(0, slash);
  if (slash != std::string::npos) spec.prefix = rest.substr(slash);
  while (spec.prefix.size() > 1 && spec.prefix.back() == '/') spec.prefix.pop_back();
  if (spec.prefix == "/")
    return InvalidArgument("'{}': the prefix of the keys is empty; leave it out or name one", text);
  for (size_t begin = 0; begin <= hosts.size();) {
    const size_t end = std::min(hosts.find(',', begin), hosts.size());
    const auto endpoint = ParseHostPort(hosts.substr(begin, end - begin));
    if (!endpoint.ok()) return Annotate(endpoint.status(), "'" + text + "'");
    spec.endpoints.push_back(endpoint->ToString());
    begin = end + 1;
  }
  if (spec.endpoints.size() > kMaxEndpoints)
    return InvalidArgument("'{}' has {} addresses, at most {}", text, spec.endpoints.size(), kMaxEndpoints);
  return spec;
}

}  // namespace

const char* RoleName(Role role) { return role == Role::kPrefill ? "prefill" : "decode"; }

void Normalize(Members& members) {
  const auto place = [](const Member& m) { return std::tie(m.role, m.address); };
  std::stable_sort(members.begin(), members.end(),
                   [&](const Member& a, const Member& b) { return place(a) < place(b); });
  const auto same = [&](const Member& a, const Member& b) { return place(a) == place(b); };
  members.erase(std::unique(members.begin(), members.end(), same), members.end());
}

absl::StatusOr<Spec> ParseSpec(const std::string& text) {
  const std::string etcd = "etcd://", kubernetes = "kubernetes://";
  if (text == "static") return Spec{};
  if (text.rfind(etcd, 0) == 0) return ParseEtcd(text, text.substr(etcd.size()));
  if (text.rfind(kubernetes, 0) == 0) {
    const std::string rest = text.substr(kubernetes.size());
    const size_t slash = rest.find('/');
    Spec spec{.kind = Spec::Kind::kKubernetes, .name_space = rest.substr(0, slash)};
    if (slash != std::string::npos) spec.service = rest.substr(slash + 1);
    if (!IsLabel(spec.name_space) || !IsLabel(spec.service))
      return InvalidArgument("'{}' is not kubernetes://NAMESPACE/SERVICE with names of Kubernetes", text);
    return spec;
  }
  return InvalidArgument("'{}' is not static, etcd://HOST:PORT[,…][/PREFIX] or kubernetes://NAMESPACE/SERVICE", text);
}

}  // namespace spl::membership
