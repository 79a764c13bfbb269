#include "services/router/admission/fair_queue.h"

#include <gtest/gtest.h>

#include <random>

namespace spl::router {
namespace {

using Clock = FairQueue::Clock;

QueuedRequest Request(uint64_t id, const std::string& tenant, uint32_t tokens, int32_t priority = 0,
                      double weight = 1) {
  return {.id = id, .tenant = tenant, .weight = weight, .priority = priority, .tokens = tokens};
}

std::vector<uint64_t> Drain(FairQueue& queue) {
  std::vector<uint64_t> ids;
  while (auto request = queue.Pop()) ids.push_back(request->id);
  return ids;
}

TEST(FairQueueTest, OneTenantIsFirstComeFirstServed) {
  FairQueue queue({});
  for (uint64_t id = 1; id <= 5; ++id) queue.Push(Request(id, "a", 100'000 / id), Clock::now());
  EXPECT_EQ(Drain(queue), (std::vector<uint64_t>{1, 2, 3, 4, 5}));
}

TEST(FairQueueTest, PrioritiesAgeSoThatNobodyStarves) {
  FairQueue queue({.ageing = std::chrono::seconds(10)});
  const Clock::time_point now = Clock::now();
  queue.Push(Request(1, "a", 10, 2), now);                              // as if it came 20 s later
  queue.Push(Request(2, "a", 10, 0), now + std::chrono::seconds(5));    // first
  queue.Push(Request(3, "a", 10, 0), now + std::chrono::seconds(25));   // too late to overtake 1
  queue.Push(Request(4, "a", 10, -3), now + std::chrono::seconds(26));  // but this one does: 26 - 30 < 5
  EXPECT_EQ(Drain(queue), (std::vector<uint64_t>{4, 2, 1, 3}));
}

// Served tokens follow the weights as long as every tenant has something waiting, whatever the sizes of requests.
TEST(FairQueueTest, TenantsShareTokensByWeight) {
  FairQueue queue({.quantum_tokens = 1000});
  std::mt19937 random(11);
  const Clock::time_point now = Clock::now();
  uint64_t id = 0;
  for (int i = 0; i < 4000; ++i) queue.Push(Request(++id, "small", 50 + random() % 100), now);
  for (int i = 0; i < 400; ++i) queue.Push(Request(++id, "large", 5'000 + random() % 10'000), now);
  for (int i = 0; i < 2000; ++i) queue.Push(Request(++id, "double", 500 + random() % 1000, 0, 2), now);
  std::map<std::string, uint64_t> served;
  for (uint64_t total = 0; total < 1'000'000;) {
    const QueuedRequest request = queue.Pop().value();
    served[request.tenant] += request.tokens;
    total += request.tokens;
  }
  EXPECT_NEAR(static_cast<double>(served["small"]), 250'000, 16'000);
  EXPECT_NEAR(static_cast<double>(served["large"]), 250'000, 16'000);
  EXPECT_NEAR(static_cast<double>(served["double"]), 500'000, 16'000);
}

TEST(FairQueueTest, ALateTenantIsNotBehindTheBacklogOfAnother) {
  FairQueue queue({.quantum_tokens = 1000});
  for (uint64_t id = 1; id <= 100; ++id) queue.Push(Request(id, "a", 1000), Clock::now());
  for (int i = 0; i < 10; ++i) queue.Pop();
  queue.Push(Request(1000, "b", 1000), Clock::now());
  std::vector<uint64_t> next;
  for (int i = 0; i < 3; ++i) next.push_back(queue.Pop()->id);
  EXPECT_NE(std::find(next.begin(), next.end(), 1000u), next.end());
}

TEST(FairQueueTest, FrontGoesFirstAndRemoveFindsEverything) {
  FairQueue queue({});
  queue.Push(Request(1, "a", 1), Clock::now());
  queue.Push(Request(2, "b", 1), Clock::now());
  queue.PushFront(Request(3, "b", 1));
  queue.PushFront(Request(4, "a", 1));
  EXPECT_TRUE(queue.Remove(3));
  EXPECT_TRUE(queue.Remove(1));
  EXPECT_FALSE(queue.Remove(1));
  EXPECT_EQ(queue.size(), 2u);
  EXPECT_EQ(Drain(queue), (std::vector<uint64_t>{4, 2}));
  EXPECT_FALSE(queue.Pop().has_value());
}

}  // namespace
}  // namespace spl::router
