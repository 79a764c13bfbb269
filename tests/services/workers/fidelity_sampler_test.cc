// A share of the prompts is computed exactly, too: what is counted, and that the request itself is left as it was.
#include "services/prefill_work/fidelity_sampler.h"

#include "tests/services/engine/engines_fixture.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

using test::SeededRandom;
using testing::HasSubstr;
using testing::Not;

class FidelitySamplerTest : public EnginesTest {
 protected:
  Metrics metrics_;
};

TEST_F(FidelitySamplerTest, ApproximatePromptsAreCompared) {
  std::mt19937 random = SeededRandom("fidelity");
  Start(16384);
  prefill::FidelitySampler sampler(*prefill_, {1}, metrics_);
  const auto document = RandomPrompt(random, 400);
  // Runs a watched request to its end; the logits that its owner sees.
  const auto run = [&](const std::vector<int32_t>& prompt, int32_t begin, const char* policy, bool wants_logits) {
    auto outcome = std::make_shared<Outcome>();
    PrefillRequest request;
    request.tokens = prompt;
    request.sampling = Greedy(4);
    request.segments = {{{begin, begin + 400}, kDocs}};
    request.reuse.policy = policy;
    request.return_first_logits = wants_logits;
    request.on_done = [outcome](const absl::Status& status, PrefillOutcome result) {
      outcome->stats = result.stats;
      outcome->first_logits = result.first_logits;
      outcome->Finish(status);
    };
    sampler.Watch(request);
    EXPECT_TRUE(prefill_->Submit(std::move(request)).ok());
    EXPECT_TRUE(outcome->Wait());
    EXPECT_TRUE(outcome->status.ok()) << outcome->status;
    prefill_->WaitIdle(std::chrono::steady_clock::now() + 60s);
    return outcome;
  };
  // Nothing to copy: exact, so nothing to compare.
  EXPECT_TRUE(run(Concatenate({document, RandomPrompt(random, 50)}), 0, "naive", false)->stats.exact);
  EXPECT_THAT(metrics_.Render(), Not(HasSubstr("splice_fidelity_samples_total")));
  const auto prompt = Concatenate({RandomPrompt(random, 100), document, RandomPrompt(random, 50)});
  const auto copied = run(prompt, 100, "naive", false);
  EXPECT_FALSE(copied->stats.exact);
  EXPECT_TRUE(copied->first_logits.empty()) << "nobody asked for them";
  EXPECT_THAT(metrics_.Render(), HasSubstr("splice_fidelity_samples_total{method=\"naive\",stage=\"prefill\"} 1"));
  EXPECT_FALSE(run(prompt, 100, "naive", true)->first_logits.empty());
  EXPECT_THAT(metrics_.Render(), HasSubstr("splice_fidelity_samples_total{method=\"naive\",stage=\"prefill\"} 2"));
  EXPECT_THAT(metrics_.Render(), HasSubstr("splice_fidelity_cosine_count{method=\"naive\",stage=\"prefill\"} 2"));
  run(prompt, 100, "exact", false);
  EXPECT_THAT(metrics_.Render(), Not(HasSubstr("method=\"exact\"")));
  // The exact runs kept nothing for later prompts: only what was in front of the copy is cached.
  EXPECT_EQ(run(prompt, 100, "naive", false)->stats.cached_tokens, 448 + 64) << "by the exact request alone";
}

}  // namespace
}  // namespace spl::engine
