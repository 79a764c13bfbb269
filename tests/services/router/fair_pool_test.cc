#include "services/router/admission/fair_pool.h"

#include <gtest/gtest.h>

#include <future>

namespace spl::router {
namespace {

// S13: who comes after a thousand requests of another is next but one.
TEST(FairPoolTest, CallersTakeTurns) {
  FairPool pool(1, 1000);
  std::promise<void> go, begun;
  std::vector<std::string> order;  // one thread works
  ASSERT_TRUE(pool.TryPost("greedy", [&, wait = go.get_future().share()] {
    begun.set_value();
    wait.wait();
  }));
  begun.get_future().wait();
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(pool.TryPost("greedy", [&] { order.push_back("greedy"); }));
  ASSERT_TRUE(pool.TryPost("modest", [&] { order.push_back("modest"); }));
  ASSERT_TRUE(pool.TryPost("modest", [&] { order.push_back("modest"); }));
  go.set_value();
  pool.Stop();
  ASSERT_EQ(order.size(), 102u) << "Stop runs what is queued";
  EXPECT_EQ(std::vector(order.begin(), order.begin() + 5),
            (std::vector<std::string>{"greedy", "modest", "greedy", "modest", "greedy"}));
}

TEST(FairPoolTest, AFullQueueIsItsCallersAlone) {
  FairPool pool(1, 2);
  std::promise<void> go, begun;
  ASSERT_TRUE(pool.TryPost("a", [&, wait = go.get_future().share()] {
    begun.set_value();
    wait.wait();
  }));
  begun.get_future().wait();
  EXPECT_TRUE(pool.TryPost("a", [] {}));
  EXPECT_TRUE(pool.TryPost("a", [] {}));
  EXPECT_FALSE(pool.TryPost("a", [] {}));
  EXPECT_TRUE(pool.TryPost("b", [] {}));
  go.set_value();
  pool.Stop();
  EXPECT_FALSE(pool.TryPost("a", [] {})) << "stopped";
}

}  // namespace
}  // namespace spl::router
