// Conversations: whose KV is kept for the next turn, for how long, and that a turn answers as the same text without
// one.
#include "services/engine/cache/session_table.h"
#include "tests/services/engine/engines_fixture.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

using test::SeededRandom;
using testing::HasSubstr;
using Time = SessionTable::Time;

constexpr KvShape kShape{.num_layers = 1, .num_kv_heads = 2};
constexpr chunk::Digest kMine{1}, kTheirs{2}, kOther{3};

class SessionTableTest : public testing::Test {
 protected:
  static constexpr int32_t kPages = 200;
  SessionTableTest() : memory_(kPages * 2 * 64 * 8 * sizeof(float)) {}
  // Whole pages; not exact from `exact` tokens on.
  std::shared_ptr<SequenceKv> Kv(int64_t tokens, int64_t exact = -1) {
    auto kv = std::make_shared<SequenceKv>(pool_, kShape);
    EXPECT_TRUE(kv->Reserve(tokens).ok());
    kv->set_num_tokens(tokens);
    if (exact >= 0) kv->LowerProvenance(chunk::Provenance::kApprox, exact);
    return kv;
  }
  // Keys of the full blocks of the first tokens of one long text, whose token `edited` is another one.
  static std::vector<chunk::ChunkKey> Text(size_t length, std::optional<size_t> edited = std::nullopt) {
    std::vector<int32_t> tokens(length);
    std::iota(tokens.begin(), tokens.end(), 0);
    if (edited.has_value()) tokens[*edited] = -1;
    return chunk::MakePrefixKeys({}, {}, tokens);
  }
  static Time At(int seconds) { return Time() + std::chrono::seconds(seconds); }

  std::vector<char> memory_;
  PagePool pool_{{reinterpret_cast<std::byte*>(memory_.data()), kernels::DType::kF32, 8, kPages}};
};

TEST_F(SessionTableTest, WhatTheNextTurnBeginsWith) {
  SessionTable table(100, 60s);
  EXPECT_EQ(table.Find({"a", kMine}, Text(300), "exact", At(0)).kv, nullptr);
  const auto kv = Kv(256);
  table.Keep({"a", kMine}, Text(256), "exact", kv, At(0));
  const auto pages = [&](const std::vector<chunk::ChunkKey>& blocks, const char* id = "a") {
    return table.Find({id, kMine}, blocks, "exact", At(1)).num_pages;
  };
  EXPECT_EQ(pages(Text(300)), 4);
  EXPECT_EQ(pages(Text(255)), 3) << "full blocks only";
  EXPECT_EQ(pages(Text(600)), 4);
  EXPECT_EQ(pages(Text(60)), 0);
  EXPECT_EQ(pages(Text(300), "b"), 0);
  EXPECT_EQ(pages(Text(300, 130)), 2);
  EXPECT_EQ(pages(Text(300, 0)), 0);
}

TEST_F(SessionTableTest, ApproximateKvIsForItsOwnMethodOnly) {
  SessionTable table(100, 60s);
  table.Keep({"a", kMine}, Text(256), "sparsex", Kv(256, 100), At(0));
  EXPECT_EQ(table.Find({"a", kMine}, Text(300), "sparsex", At(1)).num_pages, 4);
  EXPECT_EQ(table.Find({"a", kMine}, Text(300), "exact", At(1)).num_pages, 1);
  const auto match = table.Find({"a", kMine}, Text(300), "sparsex", At(1));
  SequenceKv next(pool_, kShape);
  next.AppendLeading(*match.kv, match.num_pages);
  EXPECT_EQ(next.num_tokens(), 256);
  EXPECT_EQ(next.exact_tokens(), 100);
  EXPECT_EQ(next.provenance(), chunk::Provenance::kApprox);
  SequenceKv first(pool_, kShape);
  first.AppendLeading(*match.kv, 1);
  EXPECT_EQ(first.exact_tokens(), 64);
  EXPECT_EQ(first.provenance(), chunk::Provenance::kExact);
}

// Two callers with one name have two conversations, and neither learns of the other's.
TEST_F(SessionTableTest, ANameIsOfItsNamespace) {
  SessionTable table(100, 60s);
  table.Keep({"a", kMine}, Text(256), "exact", Kv(256), At(0));
  EXPECT_EQ(table.Find({"a", kTheirs, kOther}, Text(300), "exact", At(1)).kv, nullptr);
  table.Keep({"a", kTheirs, kOther}, Text(128), "exact", Kv(128), At(1));
  EXPECT_EQ(table.Find({"a", kMine}, Text(300), "exact", At(1)).num_pages, 4) << "theirs did not take its place";
  EXPECT_EQ(table.Find({"a", kTheirs, kOther}, Text(300), "exact", At(1)).num_pages, 2);
  EXPECT_EQ(table.Find({"a", kMine, kOther}, Text(300), "exact", At(1)).kv, nullptr) << "a shared namespace";
  EXPECT_TRUE(CheckSessionName(std::string(256, 'x')).ok());
  EXPECT_EQ(CheckSessionName(std::string(257, 'x')).code(), absl::StatusCode::kInvalidArgument);
}

// One caller begins conversation after conversation: its own go, not the one of somebody who has less.
TEST_F(SessionTableTest, WhoKeepsTheMostGivesUpFirst) {
  SessionTable table(40, 1000s);
  table.Keep({"quiet", kMine}, Text(256), "exact", Kv(256), At(0));
  for (int i = 0; i < 20; ++i) {
    const std::string name = std::to_string(i);
    table.Keep({name, kTheirs, kOther}, Text(256), "exact", Kv(256), At(1 + i));
    EXPECT_LE(table.stats().num_pages, 40);
  }
  EXPECT_EQ(table.Find({"quiet", kMine}, Text(300), "exact", At(30)).num_pages, 4);
  EXPECT_EQ(table.Find({"19", kTheirs, kOther}, Text(300), "exact", At(30)).num_pages, 4);
  EXPECT_EQ(table.Find({"0", kTheirs, kOther}, Text(300), "exact", At(30)).kv, nullptr);
  EXPECT_EQ(table.stats().num_sessions, 5u);
  // For want of pages, too: the quiet one goes when nobody has more.
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(table.EvictOne());
  EXPECT_EQ(table.stats().num_sessions, 1u);
  EXPECT_TRUE(table.EvictOne());
  EXPECT_FALSE(table.EvictOne());
  EXPECT_EQ(table.stats().num_gave_way, 5u);
  EXPECT_EQ(pool_.num_free(), kPages);
}

TEST_F(SessionTableTest, AConversationThatOutgrowsItsRoomKeepsItsBeginning) {
  SessionTable table(40, 60s);
  table.Keep({"a", kMine}, Text(64 * 31), "exact", Kv(64 * 31), At(0));
  const auto match = table.Find({"a", kMine}, Text(3000), "exact", At(1));
  EXPECT_EQ(match.num_pages, 20) << "of 31";
  EXPECT_EQ(match.kv->num_tokens(), 64 * 20);
  EXPECT_EQ(table.stats().num_pages, 40);
  // Another owner has a fair share: the large one gives up, which is its only conversation.
  table.Keep({"b", kTheirs, kOther}, Text(64 * 5), "exact", Kv(64 * 5), At(2));
  EXPECT_EQ(table.Find({"b", kTheirs, kOther}, Text(3000), "exact", At(3)).num_pages, 5);
  table.Keep({"a", kMine}, Text(64 * 31), "exact", Kv(64 * 31), At(4));
  EXPECT_EQ(table.Find({"a", kMine}, Text(3000), "exact", At(5)).num_pages, 15) << "what the other one leaves";
  EXPECT_EQ(table.Find({"b", kTheirs, kOther}, Text(3000), "exact", At(5)).num_pages, 5);
  // Less than a page for each stream, and nothing: not kept.
  SessionTable small(1, 60s);
  small.Keep({"a", kMine}, Text(64), "exact", Kv(64), At(0));
  small.Keep({"b", kMine}, Text(0), "exact", Kv(0), At(0));
  EXPECT_EQ(small.stats().num_sessions, 0u);
}

TEST_F(SessionTableTest, LeasesEndAndUseRenewsThem) {
  SessionTable table(100, 60s);
  table.Keep({"a", kMine}, Text(128), "exact", Kv(128), At(0));
  table.Keep({"b", kMine}, Text(128), "exact", Kv(128), At(10));
  EXPECT_EQ(table.Find({"a", kMine}, Text(200), "exact", At(50)).num_pages, 2);
  table.Expire(At(75));
  EXPECT_EQ(table.stats().num_sessions, 1u);
  EXPECT_EQ(table.stats().num_expired, 1u);
  EXPECT_EQ(table.Find({"b", kMine}, Text(200), "exact", At(75)).kv, nullptr);
  EXPECT_EQ(table.Find({"a", kMine}, Text(200), "exact", At(75)).num_pages, 2);
  table.Expire(At(200));
  EXPECT_EQ(table.stats().num_sessions, 0u);
  EXPECT_EQ(pool_.num_free(), kPages);
}

// Pages that a running turn shares would not be free without the table.
TEST_F(SessionTableTest, PagesThatNobodyElseHasAreAvailable) {
  {
    SessionTable table(100, 60s);
    table.Keep({"a", kMine}, Text(256), "exact", Kv(256), At(0));
    table.Keep({"b", kMine}, Text(128), "exact", Kv(128), At(0));
    EXPECT_EQ(pool_.num_free(), kPages - 2 * (4 + 2));
    EXPECT_EQ(pool_.num_available(), kPages);
    {
      SequenceKv turn(pool_, kShape);
      turn.AppendLeading(*table.Find({"a", kMine}, Text(300), "exact", At(1)).kv, 3);
      EXPECT_EQ(pool_.num_available(), kPages - 2 * 3);
      EXPECT_TRUE(table.EvictOne() && table.EvictOne());
      EXPECT_EQ(pool_.num_free(), kPages - 2 * 3);
      EXPECT_EQ(pool_.num_available(), kPages - 2 * 3);
    }
    table.Keep({"c", kMine}, Text(128), "exact", Kv(128), At(2));
    pool_.CheckInvariants();
  }
  EXPECT_EQ(pool_.num_free(), kPages);
}

// Memory is flat once the budget is reached.
TEST_F(SessionTableTest, RandomUseStaysWithinTheBudget) {
  std::mt19937 random = SeededRandom("sessions");
  constexpr int64_t kBudget = 60;
  SessionTable table(kBudget, 1000s);
  for (int step = 0; step < 500; ++step) {
    const std::string id(1, static_cast<char>('a' + random() % 12));
    const auto pages = static_cast<int64_t>(1 + random() % 12);  // of each of two streams
    EXPECT_LE(table.Find({id, kMine}, Text(2000), "exact", At(step)).num_pages, 12);
    table.Keep({id, kMine}, Text(static_cast<size_t>(64 * pages)), "exact", Kv(64 * pages), At(step));
    EXPECT_EQ(table.Find({id, kMine}, Text(2000), "exact", At(step)).num_pages, pages);
    const SessionTable::Stats stats = table.stats();
    EXPECT_LE(stats.num_pages, kBudget);
    EXPECT_EQ(pool_.num_free(), kPages - stats.num_pages);
  }
  EXPECT_GT(table.stats().num_evicted, 0u);
  table.Keep({"a", kMine}, Text(64 * 31), "exact", Kv(64 * 31), At(500));
  EXPECT_EQ(table.Find({"a", kMine}, Text(3000), "exact", At(500)).num_pages, 30) << "what the budget holds of it";
  while (table.EvictOne()) {
  }
  EXPECT_EQ(pool_.num_free(), kPages);
  pool_.CheckInvariants();
}

class SessionTest : public EnginesTest {
 protected:
  static std::function<void(PrefillRequest&)> Turn(const char* session, const char* policy = "exact") {
    return [=](PrefillRequest& request) {
      request.session = session;
      request.namespace_key = kMine;
      request.reuse.policy = policy;
    };
  }
};

// Each turn: what was said, the answer, and something new. What is computed is the answer and the new text.
TEST_F(SessionTest, TurnsAnswerAsTheWholeTextDoes) {
  std::mt19937 random = SeededRandom("turns");
  PrefillEngineOptions options;
  options.prefix_cache = false;  // only the conversation keeps anything
  Start(8192, 8192, options);
  std::vector<int32_t> text = RandomPrompt(random, 300);
  for (int turn = 0; turn < 6; ++turn) {
    const auto outcome = Ask(text, Turn("talk"));
    EXPECT_EQ(outcome->tokens, Expected(text, Greedy(6))) << "turn " << turn;
    EXPECT_TRUE(outcome->stats.exact);
    if (turn > 0) {
      EXPECT_GT(outcome->stats.session_tokens, 0);
      EXPECT_EQ(outcome->stats.cached_tokens, outcome->stats.session_tokens);
      EXPECT_LT(outcome->stats.computed_tokens, 6 + 100 + 2 * 64) << "turn " << turn;
    }
    text = Concatenate({text, outcome->tokens[0], RandomPrompt(random, 20 + random() % 80)});
  }
  // Somebody else's conversation of that name.
  const auto theirs = Ask(text, [](PrefillRequest& request) {
    request.session = "talk";
    request.namespace_key = kTheirs;
  });
  EXPECT_EQ(theirs->stats.session_tokens, 0);
}

// A first turn over copies of segments is approximate: its KV serves the next turn of that method, and nobody else.
TEST_F(SessionTest, ApproximateHistoryStaysInItsConversation) {
  std::mt19937 random = SeededRandom("approximate");
  PrefillEngineOptions options;
  options.canonical_prefill = false;
  Start(16384, 8192, options);
  const auto document = RandomPrompt(random, 400), other = RandomPrompt(random, 100);
  const auto with_document = [&](PrefillRequest& request, int32_t begin) {
    request.segments = {{{begin, begin + 400}, kDocs}};
    request.namespace_key = kMine;
    request.reuse.policy = "sparsex";
  };
  Ask(Concatenate({document, other}), [&](PrefillRequest& r) { with_document(r, 0); });
  const auto ask = [&](const std::vector<int32_t>& text, const char* session, const char* policy) {
    return Ask(text, [&](PrefillRequest& r) {
      with_document(r, 100);
      r.session = session;
      r.reuse.policy = policy;
    });
  };
  const auto first_text = Concatenate({RandomPrompt(random, 100), document, RandomPrompt(random, 60)});
  const auto first = ask(first_text, "talk", "sparsex");
  EXPECT_FALSE(first->stats.exact);
  EXPECT_EQ(first->stats.aligned_tokens, 400);
  const auto second_text = Concatenate({first_text, first->tokens[0], RandomPrompt(random, 50)});
  const auto second = ask(second_text, "talk", "sparsex");
  EXPECT_EQ(second->stats.session_tokens, 512);
  EXPECT_EQ(second->stats.aligned_tokens, 0);
  EXPECT_FALSE(second->stats.exact) << "it stands behind copies";
  // The same method with another option takes only what is exact: the history's KV is not what it would have computed.
  const auto changed = Ask(second_text, [&](PrefillRequest& r) {
    with_document(r, 100);
    r.session = "talk";
    r.reuse.recompute_share = 0.5;
    r.publish = false;
  });
  EXPECT_EQ(changed->stats.cached_tokens, 64);
  EXPECT_EQ(changed->stats.aligned_tokens, 400);
  // Without the conversation: the document is found as a segment again, and nothing of the history was published.
  const auto alone = ask(second_text, "", "sparsex");
  EXPECT_EQ(alone->stats.session_tokens, 0);
  EXPECT_EQ(alone->stats.aligned_tokens, 400);
  EXPECT_EQ(alone->stats.cached_tokens, 64) << "the page in front of the document is exact";
  // An exact request of the conversation takes only what is exact.
  const auto exact = ask(second_text, "talk", "exact");
  EXPECT_EQ(exact->stats.cached_tokens, 64);
  EXPECT_TRUE(exact->stats.exact);
  EXPECT_EQ(exact->tokens, Expected(second_text, Greedy(6)));
}

TEST_F(SessionTest, PagesGoWhenOthersNeedThem) {
  std::mt19937 random = SeededRandom("pages");
  PrefillEngineOptions options;
  options.prefix_cache = false;
  options.session_share = 1;
  Start(1024, 8192, options);
  const auto first = RandomPrompt(random, 600);
  Ask(first, Turn("a"));
  WaitUntilKept();
  EXPECT_EQ(prefill_->session_stats().num_sessions, 1u);
  const auto large = RandomPrompt(random, 900);
  EXPECT_EQ(Ask(large, Turn("b"))->tokens, Expected(large, Greedy(6)));
  WaitUntilKept();
  EXPECT_EQ(prefill_->session_stats().num_sessions, 1u);
  EXPECT_EQ(prefill_->session_stats().num_gave_way, 1u);
  const auto again = Ask(first, Turn("a"));
  EXPECT_EQ(again->stats.session_tokens, 0) << "gone: computed anew";
  EXPECT_EQ(again->tokens, Expected(first, Greedy(6)));
}

}  // namespace
}  // namespace spl::engine
