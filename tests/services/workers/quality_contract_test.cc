// The choices of `auto` for real prompts, and a contract that is kept: a method runs where its record proves it, and is
// measured beside where it does not.
#include "services/base/fault_point.h"
#include "services/engine/methods/recovery_methods.h"
#include "services/prefill_work/fidelity_sampler.h"
#include "tests/services/engine/engines_fixture.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

using test::SeededRandom;

chunk::Digest Namespace(uint8_t number) {
  chunk::Digest digest{};
  digest[0] = number;
  return digest;
}

class QualityContractTest : public EnginesTest {
 protected:
  void StartSampler(prefill::FidelityShares shares) {
    PrefillEngineOptions options;
    options.canonical_prefill = false;
    Start(16384, 8192, options);
    sampler_ = std::make_unique<prefill::FidelitySampler>(*prefill_, shares, metrics_);
  }
  void TearDown() override {
    DisarmAllFaults();
    EnginesTest::TearDown();
  }

  // Watches the request, and waits for it and for what is ordered behind it.
  std::shared_ptr<Outcome> Watched(const std::vector<int32_t>& prompt,
                                   const std::function<void(PrefillRequest&)>& change) {
    auto outcome = std::make_shared<Outcome>();
    PrefillRequest request;
    request.tokens = prompt;
    request.sampling = Greedy(1);
    change(request);
    request.on_done = [outcome](const absl::Status& status, PrefillOutcome result) {
      outcome->stats = result.stats;
      outcome->first_logits = result.first_logits;
      outcome->Finish(status);
    };
    sampler_->Watch(request);
    EXPECT_TRUE(prefill_->Submit(std::move(request)).ok());
    EXPECT_TRUE(outcome->Wait());
    EXPECT_TRUE(outcome->status.ok()) << outcome->status;
    // A run that another one ends with is submitted before that one counts as finished.
    prefill_->WaitIdle(std::chrono::steady_clock::now() + 60s);
    return outcome;
  }

  // Documents of so many tokens, each computed by itself; then a prompt with all of them, and their places.
  struct Documents {
    std::vector<int32_t> prompt;
    std::vector<ReuseSpan> spans;
  };
  Documents Publish(std::mt19937& random, int count, int length) {
    Documents documents;
    documents.prompt = RandomPrompt(random, 20);
    for (int i = 0; i < count; ++i) {
      const auto text = RandomPrompt(random, length);
      Watched(text, [&](PrefillRequest& request) { request.segments = {{{0, length}, kDocs}}; });
      const auto begin = static_cast<int32_t>(documents.prompt.size());
      documents.spans.push_back({{begin, begin + length}, kDocs});
      documents.prompt = Concatenate({documents.prompt, text});
    }
    documents.prompt = Concatenate({documents.prompt, RandomPrompt(random, 24)});
    return documents;
  }

  Metrics metrics_;
  std::unique_ptr<prefill::FidelitySampler> sampler_;
};

TEST_F(QualityContractTest, AutoByWhatThereIsToCopy) {
  std::mt19937 random = SeededRandom("auto");
  StartSampler({0, 0});
  const auto why = [&](const std::vector<int32_t>& prompt, std::vector<ReuseSpan> spans, double quality = 0) {
    const auto outcome = Watched(prompt, [&](PrefillRequest& request) {
      request.segments = std::move(spans);
      request.terms.quality = quality;
      request.publish = false;
    });
    const MethodChoice& choice = outcome->stats.choice;
    EXPECT_EQ(outcome->stats.policy, choice.policy);
    EXPECT_EQ(outcome->stats.exact, choice.policy == "exact");
    return choice.policy + " " + std::string(NameOf(choice.why));
  };
  EXPECT_EQ(why(RandomPrompt(random, 300), {}), "exact nothing_to_copy");
  EXPECT_EQ(why(RandomPrompt(random, 300), {{{0, 200}, kDocs}}), "exact nothing_to_copy") << "not known yet";
  // So few tokens are recomputed anyway.
  const Documents few = Publish(random, 2, 200);
  EXPECT_EQ(why(few.prompt, few.spans), "exact little_to_gain");
  const Documents many = Publish(random, 3, 900);
  EXPECT_EQ(why(many.prompt, many.spans), "splice default") << "its map has a measured quality";
  EXPECT_EQ(DefaultReusePolicy(model_->head_classes().get(), 100), "splice");
  EXPECT_EQ(why(many.prompt, many.spans, 0.9), "exact no_record");
  EXPECT_EQ(why(many.prompt, many.spans, 0.9999), "exact unprovable");
  // Behind other instructions of the same length, what followed them is in its context.
  const auto context = RandomPrompt(random, 800);
  Watched(Concatenate({RandomPrompt(random, 40), context}), [&](PrefillRequest& request) {
    request.segments = {{{40, 840}, kDocs}};
  });
  const auto same = Concatenate({RandomPrompt(random, 30), context, RandomPrompt(random, 30)});
  EXPECT_EQ(why(same, {{{30, 830}, kDocs}}), "splice same_context");
}

// A router asks for the whole KV where the record is bad: decoding changes, the first token does not.
TEST_F(QualityContractTest, TheWholeKvForDecodingIsNoOtherMethod) {
  std::mt19937 random = SeededRandom("whole KV");
  StartSampler({0, 0});
  const Documents documents = Publish(random, 3, 900);
  std::vector<std::string> records;
  for (const bool full_kv : {false, true}) {
    const auto outcome = Watched(documents.prompt, [&](PrefillRequest& request) {
      request.segments = documents.spans;
      request.reuse.full_kv = full_kv;
      request.publish = false;
    });
    EXPECT_EQ(outcome->stats.policy, "splice");
    records.push_back(outcome->stats.choice.record);
  }
  EXPECT_FALSE(records[0].empty());
  EXPECT_EQ(records[0], records[1]);
}

TEST_F(QualityContractTest, RowsAreCountedByReason) {
  std::mt19937 random = SeededRandom("reasons");
  StartSampler({0, 0});
  const Documents documents = Publish(random, 3, 900);
  const auto outcome = Watched(documents.prompt, [&](PrefillRequest& request) { request.segments = documents.spans; });
  const PrefillStats& stats = outcome->stats;
  const RecomputedTokens& rows = stats.recomputed_for;
  EXPECT_EQ(rows.chosen + rows.links + rows.beside_new + rows.tail, stats.recomputed_tokens);
  // Eight first tokens of each document; 16 beside the instructions, half of which are the first document's eight, and
  // 16 beside the question.
  EXPECT_EQ(rows.links, 24);
  EXPECT_EQ(rows.beside_new, 8 + 16);
  EXPECT_EQ(rows.tail, 0);
  EXPECT_GT(rows.chosen, 400);
  EXPECT_EQ(stats.probe_layers, model_->config().num_layers);
  EXPECT_EQ(stats.dense_layers, 0);
  EXPECT_GT(stats.choice.work, 0.1);
  EXPECT_LT(stats.choice.work, 0.9);
}

// With as many dense layers as the model has, a method is exact in all but name: a true agreement. A fault makes it
// disagree.
TEST_F(QualityContractTest, ARecordIsMadeLostAndMadeAgain) {
  std::mt19937 random = SeededRandom("contract");
  StartSampler({0, 1});
  const Documents documents = Publish(random, 1, 100);
  const auto ask = [&](uint8_t space) {
    return Watched(documents.prompt,
                   [&](PrefillRequest& request) {
                     request.namespace_key = Namespace(space);
                     request.segments = documents.spans;
                     request.reuse.policy = "sparsex";
                     request.reuse.dense_layers = model_->config().num_layers;
                     request.terms.quality = 0.5;
                   })
        ->stats;
  };
  const auto ask_until = [&](uint8_t space, const std::string& policy, int most) {
    int count = 0;
    while (ask(space).choice.policy != policy && count < most) ++count;
    return count;
  };
  const auto expected = [&](const PrefillStats& stats, const char* policy, ChoiceReason why, const char* measured) {
    EXPECT_EQ(stats.policy, policy);
    EXPECT_EQ(stats.exact, stats.policy == "exact");
    EXPECT_EQ(NameOf(stats.choice.why), NameOf(why));
    EXPECT_EQ(stats.choice.measure, measured);
  };
  PrefillStats stats = ask(1);
  expected(stats, "exact", ChoiceReason::kNoRecord, "sparsex");
  EXPECT_EQ(stats.choice.copies, 100);
  EXPECT_EQ(stats.aligned_tokens, 0);
  // The first block of comparisons, each beside an exact answer. One was the first request's.
  EXPECT_EQ(ask_until(1, "sparsex", 100), prefill::AgreementRecords::kBlock - 1);
  stats = ask(1);
  expected(stats, "sparsex", ChoiceReason::kRecord, "");
  EXPECT_EQ(stats.choice.agreement.share, 1);
  EXPECT_EQ(ask_until(2, "sparsex", 100), prefill::AgreementRecords::kBlock);

  ASSERT_TRUE(ArmFault("prefill.fidelity.compare", {.kind = FaultKind::kCorrupt}).ok());
  const int failures = ask_until(1, "exact", 100);
  EXPECT_GT(failures, 5) << "one failure among so many proves nothing";
  EXPECT_LT(failures, 40);
  expected(ask(1), "exact", ChoiceReason::kBelowQuality, "sparsex");
  DisarmAllFaults();
  expected(ask(2), "sparsex", ChoiceReason::kRecord, "");
  EXPECT_EQ(ask(2).choice.agreement.share, 1) << "another namespace has a record of its own";
  const int again = ask_until(1, "sparsex", 200);
  EXPECT_GT(again, 1);
  EXPECT_LE(again, 3 * prefill::AgreementRecords::kBlock);
  EXPECT_EQ(metrics_.Render().find("splice_fidelity_skipped_total"), std::string::npos)
      << "each comparison found the copies that the prompt had found";
}

// The prompt's own KV must not serve the method that is measured beside it, which would then have nothing to recover.
TEST_F(QualityContractTest, AMeasuredPromptKeepsNothing) {
  std::mt19937 random = SeededRandom("beside");
  StartSampler({0, 1});
  const Documents documents = Publish(random, 3, 900);
  const auto ask = [&](const std::string& session) {
    return Watched(documents.prompt,
                   [&](PrefillRequest& request) {
                     request.segments = documents.spans;
                     request.terms.quality = 0.9;
                     request.session = session;
                   })
        ->stats;
  };
  for (int i = 0; i < 3; ++i) {
    const PrefillStats stats = ask("");
    EXPECT_EQ(stats.choice.measure, "sparsex");
    EXPECT_EQ(stats.cached_tokens, 0);
    EXPECT_EQ(sampler_->records().Of({}, stats.choice.measure_record).weight > i, true);
  }
  // The next turn wants it.
  EXPECT_EQ(ask("a conversation").choice.measure, "");
  EXPECT_GT(ask("").cached_tokens, 2600);
}

TEST_F(QualityContractTest, OneInTwentyByDefault) {
  EXPECT_EQ(prefill::FidelityShares().contract, 0.05);
  EXPECT_EQ(prefill::FidelityShares().approximate, 0);
}

}  // namespace
}  // namespace spl::engine
