// Where tests find the built-in model and the evaluation material beside the checkout.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

namespace spl::test {

inline const std::string kTinyModel = "models/splice-tiny";  // tests run in the source root

// ../shared, or the folder that SPLICE_SHARED_DIR names. Empty when there is neither: a test that needs it is skipped
// and says so.
inline std::string SharedDir() {
  if (const char* dir = std::getenv("SPLICE_SHARED_DIR"); dir != nullptr && *dir != '\0') return dir;
  return std::filesystem::exists("../shared/golden") ? "../shared" : "";
}

}  // namespace spl::test
