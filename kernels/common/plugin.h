// Parts that need large or vendor libraries live in plug-ins, so that every program starts without those libraries.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace spl::kernels {

// Opens lib<name>.so for the life of the process: the file named by the environment variable `variable`, or the one
// beside the program, in ../lib or in ../bin. NotFound says where it looked and why opening failed.
absl::StatusOr<void*> OpenPlugin(const std::string& name, const char* variable);

// Must be equal on both sides of a plug-in's border, or classes must not cross it.
const char* PluginBuild();

}  // namespace spl::kernels
