// Version and commit of this build of Splice.
#pragma once

#include <string>

namespace spl {

// "0.1.0".
const char* Version();
// The commit that was built, followed by "+" if files had changed since; empty outside a git checkout.
const char* Commit();
// "0.1.0 (1a2b3c4d5e6f)": the output of --version.
std::string VersionWithCommit();

}  // namespace spl
