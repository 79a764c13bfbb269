// Version of the protocol between programs. Messages only gain fields. The version grows when an old program would
// misunderstand a new one. The lowest version that is still spoken follows one release later: a cluster of version N
// can therefore be upgraded to N + 1 program by program.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "spl/v1/common.pb.h"

namespace spl::wire {

inline constexpr uint32_t kVersionMin = 2;
inline constexpr uint32_t kVersionMax = 2;

// Metadata of a worker's answer to GetInfo: its program's version and commit (VersionWithCommit), for people.
inline constexpr char kProgramVersionKey[] = "splice-version";

v1::WireVersions OwnVersions();
// FailedPrecondition names both ranges: `other` does not overlap with `own`. Zeros in `other` mean a program older than
// versions, which counts as 1. `who` and `we` are for the message: "worker decode-0", "this router".
absl::Status CheckVersions(const v1::WireVersions& other, const std::string& who, const std::string& we,
                           const v1::WireVersions& own = OwnVersions());

}  // namespace spl::wire
