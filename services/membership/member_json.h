// A member as the text that stands in etcd, readable with etcdctl. Fields that a reader does not know are ignored,
// those that are not there keep their defaults: versions of Splice may share a list.
#pragma once

#include <string>
#include <string_view>

#include "services/membership/membership.h"

namespace spl::membership {

std::string ToJson(const Member& member);
// InvalidArgument: not JSON, a field of the wrong type, no known role, or an address that is none.
absl::StatusOr<Member> MemberFromJson(std::string_view text);

}  // namespace spl::membership
