// A text that many prompts begin with: who serves it when its holder is busy, and how many workers come to hold it.
#include <gtest/gtest.h>

#include "services/router/policies/placement.h"

namespace spl::router {
namespace {

// Three prefill workers of 1,000 tokens a second; prompts of 16 shared chunks and 64 tokens of their own.
class HotPrefixTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kShared = 16 * chunk::kChunkTokens;
  static constexpr uint32_t kPrompt = kShared + 64;

  HotPrefixTest() {
    fleet_.decode.push_back({.worker_id = "d0", .epoch = 1, .max_sequences = 64, .step_seconds = 0.01});
    for (const char* id : {"p0", "p1", "p2"}) {
      PrefillView p{.worker_id = id, .epoch = 1, .tokens_per_s = 1000};
      p.peers["d0"] = {.decode_epoch = 1, .bytes_per_s = 1e9};
      fleet_.prefill.push_back(p);
      holders_.push_back({.worker_id = id, .epoch = 1, .max_chunks = 1000});
    }
    for (uint8_t i = 0; i < 16; ++i) keys_.prefix.emplace_back().bytes[0] = i;
  }
  // Places a prompt as the router does, and notes where it went.
  std::string Place() {
    const auto reuse = index_.Predict(keys_, holders_, now_);
    const PlacementQuery query{
        .fleet = fleet_, .loads = *loads_, .prompt_tokens = kPrompt, .total_tokens = kPrompt + 1, .reuse = reuse};
    const PlacedRequest placed = PlaceRequest(placement_, query).value();
    index_.Insert(keys_, holders_[placed.pair.prefill_idx], placed.exact_tokens, now_);
    return placed.pair.prefill->worker_id;
  }
  void Busy(const std::string& worker, double seconds) {
    for (PrefillView& p : fleet_.prefill) {
      if (p.worker_id == worker) p.queued_tokens = static_cast<uint64_t>(1000 * seconds);
    }
  }
  size_t Copies() {
    size_t copies = 0;
    for (const size_t leading : index_.CountLeading(keys_.prefix, holders_, now_)) copies += leading == 16 ? 1 : 0;
    return copies;
  }

  FleetSnapshot fleet_;
  std::vector<PrefixIndex::Holder> holders_;
  PromptKeys keys_;
  PrefixIndex index_{{}};
  const PrefixIndex::Clock::time_point now_ = PrefixIndex::Clock::now();
  const std::shared_ptr<LoadTracker> loads_ = std::make_shared<LoadTracker>();
  const Placement placement_{{.seed = 7}};
};

// A copy takes 1.088 s and pages of another worker; the holder needs 0.064 s behind its queue.
TEST_F(HotPrefixTest, WaitingThatIsFasterMakesNoCopy) {
  const std::string holder = Place();
  Busy(holder, 0.9);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(Place(), holder);
  EXPECT_EQ(Copies(), 1u);
}

TEST_F(HotPrefixTest, AQueueThatCostsMoreMakesOneCopyAndBothServe) {
  const std::string holder = Place();
  Busy(holder, 1.1);
  const std::string second = Place();
  EXPECT_NE(second, holder);
  EXPECT_EQ(Copies(), 2u);
  Busy(second, 0.5);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(Place(), second) << "the third worker is idle, and has nothing";
  Busy(holder, 0.2);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(Place(), holder);
  EXPECT_EQ(Copies(), 2u);
}

}  // namespace
}  // namespace spl::router
