// Conversations over prefill and decode workers in processes of their own: a turn sends the rows that are new, goes
// back to the decode worker that has the others, and is answered as without a conversation, whatever becomes of that
// worker.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>

#include "tests/cluster/processes.h"
#include "tests/support/eventually.h"
#include "tests/support/paths.h"
#include "tests/support/seeded_random.h"

namespace spl::test {
namespace {

using nlohmann::json;

constexpr int kPage = 64;
constexpr int64_t kBytesOfPages = int64_t{12} * 4 * kPage * 256;  // one of every layer and KV head, in bf16

using Tokens = std::vector<int>;

Tokens RandomText(std::mt19937& random, size_t length) {
  Tokens text(length);
  for (int& token : text) token = static_cast<int>(random() % 4000);
  return text;
}

int64_t Pages(size_t tokens) { return static_cast<int64_t>(tokens + kPage - 1) / kPage; }

// Tokens that a worker which kept `last` holds of `prompt`.
int64_t Held(const Tokens& last, const Tokens& prompt) {
  const auto equal = std::mismatch(prompt.begin(), prompt.end(), last.begin(), last.end()).first - prompt.begin();
  return std::min(static_cast<int64_t>(equal), static_cast<int64_t>(prompt.size()) - 1) / kPage * kPage;
}

struct Answer {
  std::string text;
  int64_t held = 0, moved = 0;
  std::string worker;
};

class DecodeSessionsTest : public ::testing::Test {
 protected:
  void Start(ClusterConfig config) {
    config.model_dir = kTinyModel;
    config.prefill_uses_store = false;
    cluster_ = ProcessCluster::Start(config);
    ASSERT_NE(cluster_, nullptr);
  }
  // `session` empty: the prompt by itself.
  Answer Ask(const Tokens& prompt, const std::string& session) {
    json body = {{"prompt", prompt},
                 {"max_tokens", 24},
                 {"temperature", 0},
                 {"ignore_eos", true},
                 {"splice", {{"reuse", "exact"}}}};
    if (!session.empty()) body["splice"]["session"] = session;
    const HttpReply reply = HttpPost(cluster_->http(), "/v1/completions", body.dump());
    EXPECT_EQ(reply.status, 200) << reply.body;
    const json answer = json::parse(reply.body, nullptr, false);
    if (reply.status != 200 || !answer.contains("splice")) return {};
    const json& receipt = answer["splice"];
    EXPECT_EQ(receipt["exact"], true) << receipt;
    return {.text = answer["choices"][0]["text"],
            .held = receipt["tokens"].value("held", int64_t{0}),
            .moved = receipt["bytes"]["moved"],
            .worker = receipt["workers"]["decode"]};
  }
  // A turn, answered as the same prompt by itself.
  Answer Turn(const Tokens& prompt, const std::string& session = "talk") {
    const Answer answer = Ask(prompt, session);
    EXPECT_EQ(answer.moved, (Pages(prompt.size()) - answer.held / kPage) * kBytesOfPages);
    const Answer alone = Ask(prompt, "");
    EXPECT_EQ(alone.held, 0);
    EXPECT_EQ(alone.moved, Pages(prompt.size()) * kBytesOfPages) << "without a conversation everything is sent";
    EXPECT_EQ(answer.text, alone.text);
    return answer;
  }
  // Until the router's picture of the decode workers has no load: a score weighs it against the bytes of a turn.
  void WaitUntilIdle() {
    EXPECT_TRUE(Eventually([&] {
      const json workers = json::parse(HttpGet(cluster_->http(), "/control/v1/workers").body, nullptr, false);
      return std::ranges::all_of(workers["data"], [](const json& w) {
        return w["role"] != "decode" ||
               (w["sequences"] == 0 && w["sent_sequences"] == 0 && w["free_pages"] == w["total_pages"]);
      });
    }));
  }
  static void Append(Tokens& text, const Tokens& more) { text.insert(text.end(), more.begin(), more.end()); }
  double Metric(size_t decode, const std::string& name) const {
    return MetricValue(HttpGet(cluster_->decode[decode]->ready("metrics"), "/metrics").body, name);
  }

  std::unique_ptr<ProcessCluster> cluster_;
};

TEST_F(DecodeSessionsTest, BytesOfATurnGrowWithTheNewTextOnly) {
  std::mt19937 random = SeededRandom("decode sessions");
  for (const char* transport : {"shm", "tcp"}) {
    Start({.transport = transport});
    Tokens last, text = RandomText(random, 1500);
    double moved = 0;
    for (int turn = 0; turn < 10; ++turn) {
      const Answer answer = Turn(text);
      EXPECT_EQ(answer.held, Held(last, text)) << "turn " << turn << " over " << transport;
      if (turn > 0) {
        const auto fresh = static_cast<int64_t>(text.size() - last.size());
        EXPECT_LE(answer.moved, (fresh / kPage + 2) * kBytesOfPages) << "turn " << turn << " over " << transport;
      }
      // The decode worker counted what the receipts say: of the turn and of the prompt by itself.
      moved += static_cast<double>(answer.moved + Pages(text.size()) * kBytesOfPages);
      EXPECT_TRUE(Eventually([&] { return Metric(0, "splice_kv_transfer_bytes_total") == moved; }));
      last = text;
      Append(text, RandomText(random, 20 + random() % 100));  // stands for the answer, too, which is not kept
    }
    EXPECT_TRUE(Eventually([&] { return Metric(0, "splice_decode_sessions") == 1; }));
    const auto kept = static_cast<double>(last.size() / kPage * 48);
    EXPECT_TRUE(Eventually([&] { return Metric(0, "splice_decode_session_pages") == kept; })) << kept;
  }
}

// A worker that has restarted holds nothing, and is sent everything once.
TEST_F(DecodeSessionsTest, AWorkerThatIsKilledBetweenTurnsCostsOneWholePrompt) {
  std::mt19937 random = SeededRandom("killed between turns");
  Start({.transport = "shm"});
  Tokens last, text = RandomText(random, 700);
  for (int turn = 0; turn < 6; ++turn) {
    if (turn == 3) {
      const std::string address = cluster_->decode[0]->ready("grpc");
      cluster_->decode[0]->Signal(SIGKILL);
      EXPECT_EQ(cluster_->decode[0]->WaitForExit(), 128 + SIGKILL);
      cluster_->decode[0] =
          Process::StartAndWaitReady({BinDir() + "/splice-decode", "--model", kTinyModel, "--kv-transport", "shm",
                                      "--kv-bytes", "1GiB", "--listen", address});
      ASSERT_NE(cluster_->decode[0], nullptr);
      last.clear();
    }
    const Answer answer = Turn(text);
    EXPECT_EQ(answer.held, Held(last, text)) << "turn " << turn;
    last = text;
    Append(text, RandomText(random, 80));
  }
}

// Placement remembers the worker of the last turn; when it is gone the next one takes over.
TEST_F(DecodeSessionsTest, TurnsGoBackToTheWorkerThatHoldsThem) {
  std::mt19937 random = SeededRandom("two decode workers");
  // Over a link that makes the bytes dearer than the load of a sequence that has just ended.
  Start({.transport = "tcp", .num_decode = 2});
  Tokens last, text = RandomText(random, 1500);
  std::string worker;
  for (int turn = 0; turn < 9; ++turn) {
    WaitUntilIdle();
    const Answer answer = Turn(text);
    if (turn > 0) {
      EXPECT_EQ(answer.worker, worker) << "turn " << turn;
    }
    EXPECT_EQ(answer.held, Held(last, text)) << "turn " << turn;
    worker = answer.worker;
    last = text;
    Append(text, RandomText(random, 30));
  }
  const size_t holder = Metric(0, "splice_decode_session_tokens_total") > 0 ? 0 : 1;
  EXPECT_EQ(Metric(1 - holder, "splice_decode_session_tokens_total"), 0);
  cluster_->decode[holder]->Signal(SIGKILL);
  const Answer moved = Turn(text);
  EXPECT_NE(moved.worker, worker);
  EXPECT_EQ(moved.held, 0);
  last = text;
  Append(text, RandomText(random, 30));
  WaitUntilIdle();
  const Answer next = Turn(text);
  EXPECT_EQ(next.worker, moved.worker);
  EXPECT_EQ(next.held, Held(last, text));
}

// Pages that are kept are there for whoever needs them.
TEST_F(DecodeSessionsTest, AKeptPromptGivesWayToARequest) {
  std::mt19937 random = SeededRandom("gives way");
  Start({.transport = "shm", .decode_flags = {"--kv-bytes", "24MiB"}});  // 32 pages of each head: 2048 tokens
  Tokens text = RandomText(random, 640);
  EXPECT_EQ(Turn(text).held, 0);
  Append(text, RandomText(random, 60));
  EXPECT_EQ(Turn(text).held, 640);
  EXPECT_TRUE(Eventually([&] { return Metric(0, "splice_decode_sessions") == 1; }));
  const Tokens large = RandomText(random, 1700);
  EXPECT_FALSE(Ask(large, "").text.empty());
  EXPECT_TRUE(Eventually([&] { return Metric(0, "splice_decode_sessions_dropped_total") == 1; }));
  EXPECT_EQ(Turn(text).held, 0);
  EXPECT_EQ(Metric(0, "splice_num_preemptions_total"), 0);
  // A lease of its own ends what nobody comes back to.
  Start({.transport = "shm", .decode_flags = {"--session-lease", "0.5"}});
  EXPECT_EQ(Turn(text).held, 0);
  EXPECT_TRUE(Eventually([&] { return Metric(0, "splice_decode_sessions_dropped_total") == 1; }));
  EXPECT_EQ(Metric(0, "splice_decode_session_pages"), 0);
  EXPECT_EQ(Turn(text).held, 0);
}

}  // namespace
}  // namespace spl::test
