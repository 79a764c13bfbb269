// The cache of compiled grammars, with a compiler that the test holds up as long as it likes.
#include "services/grammar/grammar_cache.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <future>
#include <mutex>
#include <set>
#include <thread>

#include "services/grammar/grammar_limits.h"

namespace spl::grammar {
namespace {

using namespace std::chrono_literals;

constexpr auto kLong = 20s;

class SizedGrammar final : public TokenGrammar {
 public:
  explicit SizedGrammar(size_t bytes) : bytes_(bytes) {}
  std::unique_ptr<TokenMatcher> NewMatcher() const override { return nullptr; }
  int32_t width() const override { return 1; }
  size_t num_bytes() const override { return bytes_; }

 private:
  const size_t bytes_;
};

// Texts "slow…" wait for Release, "bad…" are refused, "wide…" take 700 bytes; all others take 100.
struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  bool open = false;
  int waiting = 0;
  std::multiset<std::string> compiled;

  void Release() {
    std::lock_guard lock(mutex);
    open = true;
    changed.notify_all();
  }
  bool WaitFor(int n) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, kLong, [&] { return waiting >= n; });
  }
};

class GatedCompiler final : public GrammarCompiler {
 public:
  explicit GatedCompiler(Gate& gate) : gate_(gate) {}
  CompiledGrammar Compile(const GrammarSpec& spec) const override {
    std::unique_lock lock(gate_.mutex);
    gate_.compiled.insert(spec.text);
    if (spec.text.starts_with("slow")) {
      ++gate_.waiting;
      gate_.changed.notify_all();
      gate_.changed.wait(lock, [&] { return gate_.open; });
    }
    if (spec.text.starts_with("bad")) return absl::InvalidArgumentError("it is bad");
    return std::make_shared<const SizedGrammar>(spec.text.starts_with("wide") ? 700 : 100);
  }

 private:
  Gate& gate_;
};

GrammarSpec Text(const std::string& text) { return {GrammarKind::kGrammar, text, false}; }

class GrammarCacheTest : public ::testing::Test {
 protected:
  GrammarCache& Make(const GrammarCacheOptions& options) {
    cache_ = std::make_unique<GrammarCache>(
        [this]() -> absl::StatusOr<std::unique_ptr<GrammarCompiler>> { return std::make_unique<GatedCompiler>(gate_); },
        options);
    return *cache_;
  }
  std::future<CompiledGrammar> Ask(const std::string& text, const std::string& tenant = "a") {
    auto answer = std::make_shared<std::promise<CompiledGrammar>>();
    cache_->Get(Text(text), tenant, [answer](CompiledGrammar grammar) { answer->set_value(std::move(grammar)); });
    return answer->get_future();
  }
  CompiledGrammar Get(const std::string& text, const std::string& tenant = "a") {
    auto answer = Ask(text, tenant);
    if (answer.wait_for(kLong) != std::future_status::ready) return absl::InternalError("no answer");
    return answer.get();
  }
  ~GrammarCacheTest() override { gate_.Release(); }

  Gate gate_;
  std::unique_ptr<GrammarCache> cache_;
};

TEST_F(GrammarCacheTest, EachTextIsCompiledOnce) {
  GrammarCache& cache = Make({});
  const CompiledGrammar first = Get("x");
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(*Get("x", "b"), *first) << "whoever asks";
  EXPECT_EQ(Get("bad").status().message(), "it is bad");
  EXPECT_EQ(Get("bad").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(gate_.compiled, (std::multiset<std::string>{"x", "bad"})) << "refusals are kept, too";
  EXPECT_EQ(cache.num_entries(), 2u);
}

TEST_F(GrammarCacheTest, WhoAsksMeanwhileWaitsForTheSameCompile) {
  Make({});
  auto one = Ask("slow"), two = Ask("slow", "b");
  ASSERT_TRUE(gate_.WaitFor(1));
  gate_.Release();
  EXPECT_EQ(*one.get(), *two.get());
  EXPECT_EQ(gate_.compiled.count("slow"), 1u);
}

TEST_F(GrammarCacheTest, OneTenantHoldsUpNoOther) {
  Make({.num_threads = 2, .running_of_tenant = 1});
  auto slow = Ask("slow 1"), behind = Ask("slow 2");
  ASSERT_TRUE(gate_.WaitFor(1));
  EXPECT_TRUE(Get("x", "b").ok());
  EXPECT_EQ(gate_.compiled.count("slow 2"), 0u) << "its second one waits for its first";
  gate_.Release();
  EXPECT_TRUE(slow.get().ok() && behind.get().ok());
}

TEST_F(GrammarCacheTest, ATenantHasSoManyWaiting) {
  Make({.num_threads = 1, .waiting_of_tenant = 2});
  auto running = Ask("slow");
  ASSERT_TRUE(gate_.WaitFor(1));
  auto one = Ask("1"), two = Ask("2");
  EXPECT_EQ(Get("3").status().code(), absl::StatusCode::kResourceExhausted);
  auto other = Ask("3", "b");
  gate_.Release();
  EXPECT_TRUE(one.get().ok() && two.get().ok() && other.get().ok());
}

TEST_F(GrammarCacheTest, WhoWaitsTooLongIsToldAndTheResultIsKept) {
  Make({.num_threads = 1, .deadline = 30ms});
  auto late = Ask("slow"), never_begun = Ask("x", "b");
  EXPECT_EQ(late.get().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(never_begun.get().status().code(), absl::StatusCode::kDeadlineExceeded);
  gate_.Release();
  while (cache_->num_entries() == 0) std::this_thread::yield();
  EXPECT_TRUE(Get("slow").ok());
  EXPECT_EQ(gate_.compiled, std::multiset<std::string>{"slow"});
}

TEST_F(GrammarCacheTest, IsBoundedInBytesAndEntries) {
  GrammarCache& cache = Make({.max_entries = 3, .max_bytes = 500});
  for (const char* text : {"1", "2", "3"}) ASSERT_TRUE(Get(text).ok());
  ASSERT_TRUE(Get("1").ok());  // used again
  ASSERT_TRUE(Get("4").ok());  // in the place of "2"
  EXPECT_EQ(cache.num_entries(), 3u);
  EXPECT_LE(cache.num_bytes(), 500u);
  ASSERT_TRUE(Get("1").ok());
  ASSERT_TRUE(Get("2").ok());
  EXPECT_EQ(gate_.compiled.count("1"), 1u);
  EXPECT_EQ(gate_.compiled.count("2"), 2u);
  EXPECT_TRUE(Get("wide").ok()) << "is used, and not kept";
  EXPECT_EQ(cache.num_entries(), 3u);
}

TEST_F(GrammarCacheTest, AnErrorThatMayPassIsNotKept) {
  std::atomic<int> calls{0};
  GrammarCache cache([&]() -> absl::StatusOr<std::unique_ptr<GrammarCompiler>> {
    ++calls;
    return absl::UnimplementedError("no plug-in");
  });
  for (int i = 1; i <= 2; ++i) {
    std::promise<CompiledGrammar> answer;
    cache.Get(Text("x"), "a", [&](CompiledGrammar grammar) { answer.set_value(std::move(grammar)); });
    EXPECT_EQ(answer.get_future().get().status().code(), absl::StatusCode::kUnimplemented);
    EXPECT_EQ(calls, i);
  }
}

TEST_F(GrammarCacheTest, StopEndsWhoWaits) {
  Make({.num_threads = 1});
  auto running = Ask("slow"), waiting = Ask("x", "b");
  ASSERT_TRUE(gate_.WaitFor(1));
  std::thread stop([&] { cache_->Stop(); });
  EXPECT_EQ(running.get().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(waiting.get().status().code(), absl::StatusCode::kUnavailable);
  gate_.Release();
  stop.join();
  EXPECT_EQ(Get("y").status().code(), absl::StatusCode::kUnavailable);
}

TEST(GrammarLimitsTest, RefusesWhatIsTooMuch) {
  const auto check = [](GrammarKind kind, const std::string& text) { return CheckGrammarSpec({kind, text, false}); };
  const auto nested = [](int depth) {
    std::string schema = "{}";
    for (int i = 1; i < depth; ++i) schema = R"({"items":)" + schema + "}";
    return schema;
  };
  EXPECT_TRUE(check(GrammarKind::kJsonSchema, nested(kMaxGrammarDepth)).ok());
  EXPECT_EQ(check(GrammarKind::kJsonSchema, nested(kMaxGrammarDepth + 1)).message(), "is nested 65 deep, at most 64");
  EXPECT_FALSE(check(GrammarKind::kRegex, std::string(100, '(') + "a" + std::string(100, ')')).ok());
  EXPECT_FALSE(check(GrammarKind::kGrammar, std::string(kMaxGrammarBytes + 1, 'a')).ok());
  EXPECT_FALSE(check(GrammarKind::kJsonSchema, std::string(10 << 20, ' ')).ok());
  EXPECT_FALSE(check(GrammarKind::kRegex, "").ok());
  EXPECT_TRUE(check(GrammarKind::kChoice, R"(["a","b"])").ok());
  for (const char* text : {"[]", "[1]", "[\"\"]", "{}", "x"}) EXPECT_FALSE(check(GrammarKind::kChoice, text).ok());
}

}  // namespace
}  // namespace spl::grammar
