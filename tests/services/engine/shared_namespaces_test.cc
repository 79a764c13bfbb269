// Documents of a namespace that callers share: an answer over them does not depend on the text that another caller had
// in front of them when the documents came into the cache, neither by the local index nor by the store.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/services/engine/engines_fixture.h"
#include "tests/support/background_idle.h"
#include "tests/support/eventually.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

using test::SeededRandom;

constexpr const char* kMethods[] = {"auto", "sparsex", "naive", "cacheblend", "epic", "samkv"};

class SharedNamespacesTest : public EnginesTest {
 protected:
  struct Said {
    Tokens tokens;
    std::vector<float> logits;  // behind the prompt
    bool operator==(const Said&) const = default;
  };

  void SetUp() override {
    std::mt19937 random = SeededRandom("shared namespaces");
    first_ = RandomPrompt(random, 300);
    second_ = RandomPrompt(random, 181);
    own_ = RandomPrompt(random, 30);
    lead_ = RandomPrompt(random, 23);
    question_ = RandomPrompt(random, 12);
    for (const size_t length : {23, 40, 200}) hidden_.push_back(RandomPrompt(random, length));
  }

  void StartEngines() {
    PrefillEngineOptions options;
    options.store = store_;
    Start(8192, 8192, options);
  }

  // [lead][first document][second document][question]; `extra`: of `lead`, the end is marked as part of the document.
  std::shared_ptr<Outcome> AskAbout(const std::vector<int32_t>& lead, const char* method, bool publish,
                                    int32_t extra = 0) {
    const auto begin = static_cast<int32_t>(lead.size()), middle = begin + static_cast<int32_t>(first_.size());
    return Ask(Concatenate({lead, first_, second_, question_}), [&](PrefillRequest& r) {
      r.segments = {
          {.range = {begin - extra, middle}, .namespace_key = kDocs, .shared = true},
          {.range = {middle, middle + static_cast<int32_t>(second_.size())}, .namespace_key = kDocs, .shared = true}};
      r.reuse.policy = method;
      r.publish = publish;
      r.return_first_logits = true;
    });
  }
  // A first caller uses the documents behind `lead`; then they are computed in the background, for everybody.
  void FirstUse(const std::vector<int32_t>& lead, int32_t extra = 0) {
    (void)AskAbout(lead, "auto", true, extra);
    EXPECT_TRUE(test::WaitBackgroundIdle(*prefill_));
  }
  // Of another caller, by every method.
  std::vector<Said> Answers() {
    std::vector<Said> answers;
    for (const char* const method : kMethods) {
      const auto outcome = AskAbout(lead_, method, false);
      EXPECT_EQ(outcome->stats.aligned_tokens, 481) << method;
      answers.push_back({outcome->tokens, outcome->first_logits});
    }
    return answers;
  }
  void ExpectEqual(const std::vector<Said>& answers, const std::vector<Said>& own, const std::string& what) {
    for (size_t i = 0; i < own.size(); ++i) {
      EXPECT_EQ(answers[i].tokens, own[i].tokens) << what << ", " << kMethods[i];
      EXPECT_TRUE(answers[i] == own[i]) << what << ", " << kMethods[i] << ": other logits";
    }
  }

  std::shared_ptr<FakeStore> store_ = std::make_shared<FakeStore>();
  std::vector<int32_t> first_, second_, own_, lead_,
      question_;                              // own_: what the asking caller has in front the first time
  std::vector<std::vector<int32_t>> hidden_;  // what the first caller has in front, one as long as lead_
};

TEST_F(SharedNamespacesTest, AnswersDoNotDependOnWhatAnotherCallerHadInFront) {
  StartEngines();
  FirstUse(own_);
  const std::vector<Said> own = Answers();
  for (const std::vector<int32_t>& hidden : hidden_) {
    store_ = std::make_shared<FakeStore>();
    StartEngines();
    FirstUse(hidden);
    ExpectEqual(Answers(), own, "behind " + std::to_string(hidden.size()) + " hidden tokens");
    // Another worker, which has nothing but what is in the store.
    for (const auto& document : {first_, second_}) {
      for (const auto& key : SegmentIndex(model_->kv_fingerprint()).KeysOf(kDocs, document)) {
        ASSERT_TRUE(test::Eventually([&] { return store_->Find(key).has_value(); }));
        EXPECT_EQ(store_->Find(key)->header.provenance, chunk::Provenance::kCanon);
      }
    }
    StartEngines();
    const auto fetched = AskAbout(lead_, "naive", false);
    EXPECT_EQ(fetched->stats.aligned_tokens, 481);
    EXPECT_GT(fetched->stats.fetched_bytes, 0);
    EXPECT_EQ(fetched->tokens, own[2].tokens) << "from the store";
    EXPECT_EQ(fetched->first_logits, own[2].logits) << "from the store";
  }
}

// The first caller marks hidden text and the document as one segment: the document inside of it is not found.
TEST_F(SharedNamespacesTest, ADocumentInsideOfALargerSegmentIsNotFound) {
  StartEngines();
  FirstUse(own_);
  const std::vector<Said> own = Answers();
  store_ = std::make_shared<FakeStore>();
  StartEngines();
  FirstUse(hidden_[2], 200);
  const auto alone = AskAbout(lead_, "naive", false);
  EXPECT_EQ(alone->stats.aligned_tokens, 181) << "the second document";
  FirstUse(own_);
  ExpectEqual(Answers(), own, "inside of a larger segment");
}

// A store that an earlier version has filled: chunks that stood behind other text are no source.
TEST_F(SharedNamespacesTest, ChunksThatStoodBehindOtherTextAreRefused) {
  StartEngines();
  const auto begin = static_cast<int32_t>(hidden_[2].size()), end = begin + static_cast<int32_t>(first_.size());
  (void)Ask(Concatenate({hidden_[2], first_, question_}), [&](PrefillRequest& r) {
    r.segments = {{{begin, end}, kDocs}};  // as a private namespace's
  });
  const auto keys = SegmentIndex(model_->kv_fingerprint()).KeysOf(kDocs, first_);
  ASSERT_TRUE(test::Eventually([&] { return store_->Find(keys.back()).has_value(); }));
  ASSERT_EQ(store_->Find(keys[0])->header.provenance, chunk::Provenance::kExact);
  for (const char* const method : {"naive", "samkv"}) {
    EXPECT_EQ(AskAbout(lead_, method, false)->stats.aligned_tokens, 0) << method << ", local source";
    StartEngines();
    EXPECT_EQ(AskAbout(lead_, method, false)->stats.aligned_tokens, 0) << method << ", from the store";
  }
}

}  // namespace
}  // namespace spl::engine
