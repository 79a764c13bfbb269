// A cluster in the process of a test, one for all tests of a suite.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "tools/cli/local_cluster.h"

namespace spl::test {

class LocalClusterTest : public ::testing::Test {
 protected:
  // Called by SetUpTestSuite of the suite.
  static void StartCluster(const cli::LocalClusterOptions& options) {
    auto cluster = cli::LocalCluster::Start(options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
  }
  static void TearDownTestSuite() {
    if (cluster_ != nullptr) cluster_->Stop();
    cluster_.reset();
  }

  static inline std::unique_ptr<cli::LocalCluster> cluster_;
};

}  // namespace spl::test
