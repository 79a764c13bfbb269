#include "services/base/version.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace spl {
namespace {

using ::testing::MatchesRegex;

TEST(Version, SaysReleaseAndCommit) {
  EXPECT_THAT(Version(), MatchesRegex("[0-9]+\\.[0-9]+\\.[0-9]+"));
  EXPECT_THAT(Commit(), MatchesRegex("([0-9a-f]{12}\\+?)?"));
  const std::string commit = Commit();
  EXPECT_EQ(VersionWithCommit(), commit.empty() ? Version() : Version() + (" (" + commit + ")"));
}

}  // namespace
}  // namespace spl
