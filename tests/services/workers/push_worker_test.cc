// The order of a push worker's tasks.
#include "services/prefill_work/push_worker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <string>

#include "tests/support/engine_devices.h"
#include "tests/support/paths.h"

namespace spl::prefill {
namespace {

// Pages of a prompt that has just begun do not hold up the last layers of another one.
TEST(PushWorkerTest, EarlyTasksRunWhenNothingElseWaits) {
  const auto model = engine::Model::Load(test::kTinyModel, *test::DevicesOf("cpu"));
  ASSERT_TRUE(model.ok()) << model.status();
  Metrics metrics;
  PushWorker worker(**model, metrics, [] {});
  std::promise<void> begun, go_on, all;
  ASSERT_TRUE(worker.Enqueue([&] {
    begun.set_value();
    go_on.get_future().wait_for(std::chrono::seconds(20));
  }));
  begun.get_future().wait_for(std::chrono::seconds(20));
  std::string order;  // the worker's until `all`
  const auto note = [&](char name) { return [&order, name] { order += name; }; };
  ASSERT_TRUE(worker.EnqueueEarly(note('a')));
  ASSERT_TRUE(worker.EnqueueEarly(note('b')));
  ASSERT_TRUE(worker.Enqueue(note('1')));
  ASSERT_TRUE(worker.Enqueue(note('2')));
  ASSERT_TRUE(worker.EnqueueEarly([&] { all.set_value(); }));
  go_on.set_value();
  ASSERT_EQ(all.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  EXPECT_EQ(order, "12ab");
  std::promise<void> woken;
  ASSERT_TRUE(worker.EnqueueEarly([&] { woken.set_value(); })) << "also when the thread sleeps";
  EXPECT_EQ(woken.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  worker.Stop();
  EXPECT_FALSE(worker.EnqueueEarly([] {}));
}

}  // namespace
}  // namespace spl::prefill
