// A contract through real programs: a method that answers as exact does is used, one that begins to answer otherwise
// gives way to exact by itself, in its namespace alone, and comes back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/cluster/processes.h"
#include "tests/support/eventually.h"
#include "tests/support/paths.h"

namespace spl::test {
namespace {

using nlohmann::json;

constexpr int kDocuments = 3, kDocumentTokens = 96;
constexpr double kQuality = 0.5;  // proven by the first 32 comparisons, lost by some twenty
constexpr int kBlock = 32;        // prefill::AgreementRecords::kBlock

struct Prompt {
  std::vector<int> tokens;
  json segments = json::array();
};

std::vector<int> Text(int number, int length) {
  std::vector<int> text;
  for (int i = 0; i < length; ++i) text.push_back(100 + (i * (2 * number + 3) + number * 977) % 3000);
  return text;
}

void Append(std::vector<int>& to, const std::vector<int>& text) { to.insert(to.end(), text.begin(), text.end()); }

// The documents in another order, and another question, for each number.
Prompt PromptOf(int number) {
  Prompt prompt{Text(500 + number, 8)};
  for (int i = 0; i < kDocuments; ++i) {
    const auto begin = prompt.tokens.size();
    Append(prompt.tokens, Text((i + number) % kDocuments, kDocumentTokens));
    prompt.segments.push_back({{"begin", begin}, {"end", prompt.tokens.size()}, {"namespace", "documents"}});
  }
  Append(prompt.tokens, Text(900 + number, 6));
  return prompt;
}

class QualityContractClusterTest : public testing::Test {
 protected:
  void SetUp() override {
    cluster_ = ProcessCluster::Start({.model_dir = kTinyModel,
                                      .prefill_uses_store = false,
                                      .prefill_flags = {"--quality-share", "1", "--fidelity-share", "0"}});
    ASSERT_NE(cluster_, nullptr);
    for (int i = 0; i < kDocuments; ++i) {
      const Prompt alone{Text(i, kDocumentTokens),
                         {{{"begin", 0}, {"end", kDocumentTokens}, {"namespace", "documents"}}}};
      (void)Ask(alone, {{"reuse", "exact"}});
    }
  }

  json Ask(const Prompt& prompt, json splice) {
    splice["segments"] = prompt.segments;
    const json body = {
        {"prompt", prompt.tokens}, {"max_tokens", 1}, {"temperature", 0}, {"logprobs", 1}, {"splice", splice}};
    const HttpReply reply = HttpPost(cluster_->http(), "/v1/completions", body.dump());
    EXPECT_EQ(reply.status, 200) << reply.body;
    return json::parse(reply.body, nullptr, false);
  }
  double MetricOf(const std::string& name) const {
    return MetricValue(HttpGet(cluster_->prefill[0]->ready("metrics"), "/metrics").body, name);
  }

  // Prompts for which copies as they are give exact's first token, and others.
  void Sort() {
    for (int number = 0; number < 60; ++number) {
      const Prompt prompt = PromptOf(number);
      const auto first = [&](const char* method) {
        return Ask(prompt, {{"reuse", method}, {"publish", false}})["choices"][0]["text"];
      };
      (first("naive") == first("exact") ? good_ : bad_).push_back(prompt);
    }
    ASSERT_GE(good_.size(), 3u);
    ASSERT_GE(bad_.size(), 3u) << "recovery is no use for such prompts";
  }

  // The receipt; returns when the comparison has been made.
  json Contract(const std::string& space, const Prompt& prompt) {
    const double before = MetricOf("splice_fidelity_samples_total");
    const json reply =
        Ask(prompt, {{"reuse", "naive"}, {"publish", false}, {"quality", kQuality}, {"namespace", space}});
    EXPECT_TRUE(Eventually([&] { return MetricOf("splice_fidelity_samples_total") > before; }));
    return reply["splice"];
  }
  // Asks until the method is `reuse`, and says how often that took.
  int AskUntil(const std::string& space, const std::vector<Prompt>& prompts, const std::string& reuse, int most) {
    for (int i = 0; i < most; ++i) {
      last_ = Contract(space, prompts[static_cast<size_t>(i) % prompts.size()]);
      if (last_["reuse"] == reuse) return i;
    }
    ADD_FAILURE() << "never " << reuse << ": " << last_;
    return most;
  }

  std::unique_ptr<ProcessCluster> cluster_;
  std::vector<Prompt> good_, bad_;
  json last_;
};

TEST_F(QualityContractClusterTest, FallsBackByItselfAndComesBack) {
  Sort();
  if (HasFatalFailure()) return;
  const json first = Contract("one", good_[0]);
  EXPECT_EQ(first["reuse"], "exact") << first;
  EXPECT_TRUE(first["exact"].get<bool>());
  EXPECT_EQ(first["choice"]["why"], "no_record");
  EXPECT_EQ(first["choice"]["method"], "naive");
  EXPECT_EQ(first["choice"]["measured_beside"], "naive");
  EXPECT_EQ(first["choice"]["quality"], kQuality);
  EXPECT_FALSE(first["choice"].contains("agreement")) << "nothing was known";

  EXPECT_EQ(AskUntil("one", good_, "naive", 2 * kBlock), kBlock - 1);
  EXPECT_EQ(last_["choice"]["why"], "record") << last_;
  EXPECT_EQ(last_["choice"]["agreement"], 1) << last_;
  EXPECT_EQ(last_["tokens"]["aligned"], kDocuments * kDocumentTokens) << last_;
  EXPECT_EQ(AskUntil("other", good_, "naive", 2 * kBlock), kBlock);

  // True disagreement, compared after answers of the method.
  EXPECT_GT(AskUntil("one", bad_, "exact", 2 * kBlock), 5);
  EXPECT_EQ(last_["choice"]["why"], "below_quality") << last_;
  EXPECT_LT(last_["choice"]["agreement_low"], kQuality) << last_;
  EXPECT_EQ(last_["choice"]["measured_beside"], "naive") << last_;
  EXPECT_EQ(last_["tokens"]["aligned"], 0) << last_;
  const json other = Contract("other", good_[0]);
  EXPECT_EQ(other["reuse"], "naive") << "another namespace has a record of its own: " << other;
  EXPECT_EQ(other["choice"]["agreement"], 1) << other;

  // Beside exact answers the method shows that it is good again.
  EXPECT_GT(AskUntil("one", good_, "naive", 4 * kBlock), 5);
  EXPECT_GE(last_["choice"]["agreement_low"], kQuality) << last_;

  const std::string metrics = HttpGet(cluster_->prefill[0]->ready("metrics"), "/metrics").body;
  EXPECT_THAT(metrics, testing::HasSubstr("splice_prefill_choices_total{method=\"exact\",why=\"below_quality\"}"));
  EXPECT_THAT(metrics, testing::HasSubstr("splice_prefill_choices_total{method=\"naive\",why=\"record\"}"));
  EXPECT_EQ(MetricValue(metrics, "splice_fidelity_records"), 2);
}

TEST_F(QualityContractClusterTest, AutoSaysWhy) {
  const auto choice = [&](const Prompt& prompt, json splice) {
    splice["publish"] = false;
    const json receipt = Ask(prompt, std::move(splice))["splice"];
    return receipt.contains("choice") ? receipt["choice"]["why"].get<std::string>() : "";
  };
  const Prompt plain{Text(77, 200)};
  EXPECT_EQ(choice(plain, json::object()), "nothing_to_copy");
  EXPECT_EQ(choice(plain, {{"quality", 0.99}}), "nothing_to_copy");
  EXPECT_EQ(choice(plain, {{"reuse", "exact"}}), "") << "it was named";
  const Prompt prompt = PromptOf(1);
  EXPECT_EQ(choice(prompt, json::object()), "little_to_gain") << "so few tokens are recomputed anyway";
  EXPECT_EQ(choice(prompt, {{"reuse", "sparsex"}}), "");
  EXPECT_EQ(choice(prompt, {{"reuse", "sparsex"}, {"quality", "0.99"}}), "no_record");
  EXPECT_EQ(choice(prompt, {{"reuse", "sparsex"}, {"quality", 0.9999}}), "unprovable");
  EXPECT_EQ(choice(prompt, {{"reuse", "sparsex"}, {"quality", "strict"}}), "");
  EXPECT_EQ(choice(prompt, {{"reuse", "sparsex"}, {"quality", 1}}), "");
}

}  // namespace
}  // namespace spl::test
