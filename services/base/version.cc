#include "services/base/version.h"

#include "services/base/commit.h"  // made by cmake/commit.cmake in the build tree

namespace spl {

const char* Version() { return SPLICE_VERSION; }
const char* Commit() { return SPLICE_COMMIT; }

std::string VersionWithCommit() {
  const std::string commit = Commit();
  return commit.empty() ? Version() : Version() + (" (" + commit + ")");
}

}  // namespace spl
