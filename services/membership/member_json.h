// A member as text in etcd, readable with etcdctl. Unknown fields are ignored and missing ones keep their defaults:
// versions of Splice may share a list.
#pragma once

#include <string>
#include <string_view>

#include "services/membership/membership.h"

namespace spl::membership {

std::string ToJson(const Member& member);
// InvalidArgument: not JSON, a field of the wrong type, an unknown role, or a malformed address.
absl::StatusOr<Member> MemberFromJson(std::string_view text);

}  // namespace spl::membership
