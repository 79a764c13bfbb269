// Tokens reach those who asked for them in order, on a thread that no step waits for.
#include "services/engine/runtime/token_delivery.h"

#include <gtest/gtest.h>

#include <future>
#include <set>
#include <thread>
#include <variant>

#include "tests/services/engine/engines_fixture.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

using test::SeededRandom;

// Everything that one listener was told, in order: tokens with their continuation, the end.
struct Told {
  using Token = std::pair<int32_t, int32_t>;
  std::vector<std::variant<Token, absl::StatusCode>> what;
  std::set<std::thread::id> threads;

  std::unique_ptr<DecodeListener> Listener() {
    return std::make_unique<DecodeListener>(DecodeListener{.on_tokens =
                                                               [this](std::span<const DecodeToken> tokens) {
                                                                 threads.insert(std::this_thread::get_id());
                                                                 for (const DecodeToken& token : tokens)
                                                                   what.emplace_back(
                                                                       Token(token.fork, token.token.token));
                                                               },
                                                           .on_done =
                                                               [this](const absl::Status& status) {
                                                                 threads.insert(std::this_thread::get_id());
                                                                 what.emplace_back(status.code());
                                                               }});
  }
};

// A latch that a callback waits at.
struct Gate {
  std::promise<void> reached, opened;
  std::shared_future<void> open = opened.get_future().share();
  void Pass() {
    reached.set_value();
    open.wait();
  }
};

TEST(TokenDeliveryTest, EachListenerIsToldEverythingInOrder) {
  std::mt19937 random = SeededRandom("the order of delivery");
  for (int round = 0; round < 40; ++round) {
    const size_t num = 1 + random() % 40;
    std::vector<Told> expected(num), told(num);
    std::vector<std::unique_ptr<DecodeListener>> listeners;
    for (Told& one : told) listeners.push_back(one.Listener());
    TokenDelivery delivery(1 + random() % 300);
    for (size_t left = num; left > 0;) {
      delivery.WaitForRoom();
      for (size_t i = 0; i < num; ++i) {
        if (listeners[i] == nullptr || random() % 4 == 0) continue;
        for (int32_t fork = 0; fork < static_cast<int32_t>(random() % 4); ++fork) {
          const auto token = static_cast<int32_t>(random() % 1000);
          delivery.AddToken(*listeners[i], {fork, {.token = token}});
          expected[i].what.emplace_back(Told::Token(fork, token));
        }
        if (random() % 30 != 0) continue;
        const absl::Status status = random() % 2 == 0 ? absl::OkStatus() : absl::CancelledError("");
        delivery.AddEnd(std::move(listeners[i]), status);
        expected[i].what.emplace_back(status.code());
        --left;
      }
      delivery.Flush();
      if (random() % 16 == 0) delivery.WaitForAll();
    }
    delivery.Stop();
    std::set<std::thread::id> threads;
    for (size_t i = 0; i < num; ++i) {
      EXPECT_EQ(told[i].what, expected[i].what) << "listener " << i << " of round " << round;
      threads.merge(told[i].threads);
    }
    EXPECT_EQ(threads.size(), 1u);
    EXPECT_FALSE(threads.contains(std::this_thread::get_id()));
  }
}

TEST(TokenDeliveryTest, TokensOfAStepComeInOneCall) {
  int calls = 0;
  auto listener = std::make_unique<DecodeListener>();
  listener->on_tokens = [&](std::span<const DecodeToken> tokens) {
    ++calls;
    EXPECT_EQ(tokens.size(), 3u);
  };
  listener->on_done = [](const absl::Status&) {};
  TokenDelivery delivery(100);
  for (int32_t fork = 0; fork < 3; ++fork) delivery.AddToken(*listener, {.fork = fork});
  delivery.Flush();
  delivery.WaitForAll();
  EXPECT_EQ(calls, 1);
  delivery.AddEnd(std::move(listener), absl::OkStatus());
  delivery.Flush();
}

TEST(TokenDeliveryTest, WhoeverAddsWaitsOnlyWhereTooMuchIsUndelivered) {
  Gate gate;
  auto listener = std::make_unique<DecodeListener>();
  std::atomic<int> calls = 0;
  listener->on_tokens = [&](std::span<const DecodeToken>) {
    if (calls++ == 0) gate.Pass();
  };
  listener->on_done = [](const absl::Status&) {};
  TokenDelivery delivery(10);
  const auto step = [&] {
    delivery.AddToken(*listener, {});
    delivery.Flush();
  };
  for (int i = 0; i < 5; ++i) step();  // a token and the call that brings it: 10
  gate.reached.get_future().wait();
  delivery.WaitForRoom();  // returns: a callback that blocks keeps nobody waiting
  step();
  std::atomic<bool> has_room = false;
  std::thread engine([&] {
    delivery.WaitForRoom();
    has_room = true;
    EXPECT_GE(calls, 1);
  });
  EXPECT_FALSE(has_room);
  EXPECT_EQ(calls, 1);
  gate.opened.set_value();
  engine.join();
  delivery.WaitForAll();
  EXPECT_EQ(calls, 6);
  delivery.AddEnd(std::move(listener), absl::OkStatus());
  delivery.Flush();
}

class DeliveryTest : public EnginesTest {};

TEST_F(DeliveryTest, ACallbackThatBlocksDoesNotKeepTheNextStepWaiting) {
  std::mt19937 random = SeededRandom("a callback that blocks");
  const auto prompt = RandomPrompt(random, 40), other = RandomPrompt(random, 30);
  Start();
  Gate gate;
  std::atomic<int> calls = 0;
  on_tokens_ = [&] {
    if (calls++ == 0) gate.Pass();
  };
  const auto blocked = Submit(prompt, Greedy(100));
  on_tokens_ = nullptr;
  gate.reached.get_future().wait();
  const auto beside = Submit(other, Greedy(50));
  // All of both sequences is decoded, and their pages are free, while the first callback has not returned.
  EXPECT_TRUE(test::Eventually(
      [&] { return decode_->load().num_steps >= 99 && decode_->load().running == 0 && decode_->load().waiting == 0; }));
  EXPECT_EQ(decode_pool_->num_free(), decode_pool_->num_pages());
  EXPECT_EQ(calls, 1);
  gate.opened.set_value();
  ASSERT_TRUE(blocked->Wait() && beside->Wait());
  EXPECT_EQ(blocked->tokens, Expected(prompt, Greedy(100)));
  EXPECT_EQ(beside->tokens, Expected(other, Greedy(50)));
}

TEST_F(DeliveryTest, StepsWaitBeforeMoreIsUndeliveredThanMayBe) {
  std::mt19937 random = SeededRandom("too much is undelivered");
  const auto prompt = RandomPrompt(random, 40);
  constexpr uint64_t kMost = 20;
  Start(8192, 8192, {}, {.max_undelivered = kMost});
  const uint64_t before = decode_->load().num_steps;
  Gate gate;
  std::atomic<int> calls = 0;
  on_tokens_ = [&] {
    if (calls++ == 0) gate.Pass();
  };
  const auto outcome = Submit(prompt, Greedy(200));
  gate.reached.get_future().wait();
  // A step is a token and the call that brings it; the one that goes beyond is still taken.
  EXPECT_TRUE(test::Eventually([&] { return decode_->load().num_steps - before >= kMost / 2 + 1; }));
  const Tokens expected = Expected(prompt, Greedy(200));  // time enough for many steps
  EXPECT_EQ(decode_->load().num_steps - before, kMost / 2 + 1);
  gate.opened.set_value();
  ASSERT_TRUE(outcome->Wait());
  EXPECT_EQ(outcome->tokens, expected);
}

// Many sequences that come, are cancelled and end: each hears of its tokens in order, of its end once and behind them,
// and its pages are free by then.
TEST_F(DeliveryTest, ManySequencesHearOfTheirEndOnceAndLast) {
  std::mt19937 random = SeededRandom("many sequences");
  constexpr int64_t kLongest = 80;
  std::vector<std::vector<int32_t>> prompts;
  std::vector<std::vector<int32_t>> answers;
  for (int i = 0; i < 4; ++i) {
    prompts.push_back(RandomPrompt(random, 20 + random() % 60));
    answers.push_back(Expected(prompts.back(), Greedy(kLongest))[0]);
  }
  Start(8192, 16384, {}, {.executor = {.max_rows = 12}, .max_undelivered = 1 + random() % 50});
  struct One {
    std::shared_ptr<Outcome> outcome;
    CancelFlag cancelled = std::make_shared<std::atomic<bool>>(false);
    size_t prompt = 0;
    int64_t num_tokens = 0;
    std::atomic<int> ends = 0, late = 0;
  };
  std::vector<std::unique_ptr<One>> all;
  for (int i = 0; i < 60; ++i) {
    all.push_back(std::make_unique<One>());
    One& one = *all.back();
    one.prompt = random() % prompts.size();
    one.num_tokens = 2 + static_cast<int64_t>(random() % (kLongest - 2));
    on_tokens_ = [&one] { one.late += one.ends > 0; };
    change_decode_ = [&one](DecodeRequest& request) {
      request.on_done = [&one, done = std::move(request.on_done)](const absl::Status& status) {
        ++one.ends;
        done(status);
      };
    };
    one.outcome = Submit(prompts[one.prompt], Greedy(one.num_tokens), one.cancelled);
    if (random() % 3 != 0) continue;
    *all[random() % all.size()]->cancelled = true;
    decode_->Wake();
  }
  for (const auto& one : all) ASSERT_TRUE(one->outcome->Wait());
  EXPECT_EQ(decode_pool_->num_free(), decode_pool_->num_pages());
  StopAll();
  for (const auto& one : all) {
    const std::vector<int32_t>& tokens = one->outcome->tokens[0];
    const std::vector<int32_t>& answer = answers[one->prompt];
    EXPECT_EQ(one->late, 0);
    EXPECT_LE(one->ends, 1);  // none where it was cancelled in its prefill
    if (one->outcome->status.ok()) {
      EXPECT_EQ(one->ends, 1);
      EXPECT_EQ(tokens.size(), static_cast<size_t>(one->num_tokens));
    } else {
      EXPECT_EQ(one->outcome->status.code(), absl::StatusCode::kCancelled) << one->outcome->status;
    }
    ASSERT_LE(tokens.size(), answer.size());
    EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), answer.begin()));
  }
}

// Stopping ends what runs, and returns when all of them have heard of it.
TEST_F(DeliveryTest, StopReturnsBehindTheLastCallback) {
  std::mt19937 random = SeededRandom("stop behind callbacks");
  Start();
  std::vector<std::shared_ptr<Outcome>> outcomes;
  for (int i = 0; i < 6; ++i) outcomes.push_back(Submit(RandomPrompt(random, 30), Greedy(2000)));
  ASSERT_TRUE(test::Eventually([&] { return decode_->load().running == 6; }));
  decode_->Stop();
  for (const auto& outcome : outcomes) {
    const std::lock_guard lock(outcome->mutex);
    EXPECT_TRUE(outcome->done);
    EXPECT_EQ(outcome->status.code(), absl::StatusCode::kUnavailable);
  }
}

}  // namespace
}  // namespace spl::engine
