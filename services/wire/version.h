// The version of the protocol between programs. Messages only gain fields; the version grows when an old program would
// misunderstand a new one, and the least one that is still spoken follows a release later. So a cluster of version N
// can be upgraded to N + 1 program by program.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "spl/v1/common.pb.h"

namespace spl::wire {

inline constexpr uint32_t kVersionMin = 2;
inline constexpr uint32_t kVersionMax = 2;

v1::WireVersions OwnVersions();
// FailedPrecondition names both ranges when `other` (zeros: a program from before versions, which is 1) does not
// overlap with `own`. `who` and `we` are for the message: "worker decode-0", "this router".
absl::Status CheckVersions(const v1::WireVersions& other, const std::string& who, const std::string& we,
                           const v1::WireVersions& own = OwnVersions());

}  // namespace spl::wire
