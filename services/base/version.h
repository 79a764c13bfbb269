// Which build of Splice this is.
#pragma once

#include <string>

namespace spl {

// "0.1.0".
const char* Version();
// The commit that was built, with "+" behind it where files had changed since; empty outside of a git checkout.
const char* Commit();
// "0.1.0 (1a2b3c4d5e6f)", what --version says.
std::string VersionWithCommit();

}  // namespace spl
