// Properties of placement: what must make a pair dearer, and what must never be picked.
#include "services/router/policies/placement.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "services/router/policies/picker.h"

namespace spl::router {
namespace {

class PlacementTest : public ::testing::Test {
 protected:
  PlacementTest() {
    for (int i = 0; i < 2; ++i) {
      PrefillView p{.worker_id = "p" + std::to_string(i), .epoch = 1, .tokens_per_s = 1000};
      for (int k = 0; k < 2; ++k) p.peers["d" + std::to_string(k)] = {.decode_epoch = 1, .bytes_per_s = 1e9};
      fleet_.prefill.push_back(p);
      fleet_.decode.push_back({.worker_id = "d" + std::to_string(i),
                               .epoch = 1,
                               .max_sequences = 64,
                               .free_pages = 1000,
                               .total_pages = 1000,
                               .step_seconds = 0.01,
                               .kv_bytes_per_token = 100'000});
    }
  }
  absl::StatusOr<Candidate> Place(uint32_t prompt_tokens = 1000) {
    return placement_.Place({.fleet = fleet_,
                             .loads = *loads_,
                             .prompt_tokens = prompt_tokens,
                             .total_tokens = prompt_tokens + 1,
                             .cached_tokens = cached_,
                             .full = &full_,
                             .failed = &failed_});
  }
  // How often each pair is taken in 200 tries.
  std::map<std::string, int> Shares() {
    std::map<std::string, int> shares;
    for (int i = 0; i < 200; ++i) {
      const Candidate c = Place().value();
      ++shares[c.prefill->worker_id + c.decode->worker_id];
    }
    return shares;
  }

  FleetSnapshot fleet_;
  std::shared_ptr<LoadTracker> loads_ = std::make_shared<LoadTracker>();
  std::vector<uint64_t> cached_ = {0, 0};
  std::set<std::string> full_;
  std::set<std::string> failed_;
  Placement placement_{{.seed = 42}};
};

TEST_F(PlacementTest, EqualPairsShareTheLoad) {
  const auto shares = Shares();
  ASSERT_EQ(shares.size(), 4u);
  for (const auto& [pair, count] : shares) EXPECT_GT(count, 20) << pair;
}

TEST_F(PlacementTest, PrefixHitsAttract) {
  cached_ = {0, 512};
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair[1], '1');
}

TEST_F(PlacementTest, AQueueOutweighsASmallerHit) {
  cached_ = {0, 512};
  fleet_.prefill[1].queued_tokens = 600;
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair[1], '0');
}

TEST_F(PlacementTest, WhatWasJustRoutedCountsAsLoad) {
  const LoadTracker::Hold hold = loads_->Add("p0", {.prefill_tokens = 500});
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair[1], '1');
}

TEST_F(PlacementTest, FasterWorkerIsPreferred) {
  fleet_.prefill[0].tokens_per_s = 3000;
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair[1], '0');
}

TEST_F(PlacementTest, FasterLinkIsPreferred) {
  fleet_.prefill[0].peers["d1"].bytes_per_s = 10e9;
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair, "p0d1");
}

TEST_F(PlacementTest, PressureGrowsWithSequencesAndPages) {
  const PressureScorer scorer({});
  const PlacementQuery query{.fleet = fleet_, .loads = *loads_};
  Candidate candidate{.prefill = &fleet_.prefill[0], .decode = &fleet_.decode[0]};
  double last = -1;
  for (uint32_t sequences = 0; sequences <= 64; sequences += 8) {
    fleet_.decode[0].sequences = sequences;
    const double now = scorer.Seconds(query, candidate);
    EXPECT_GT(now, last);
    last = now;
  }
  fleet_.decode[0].sequences = 0;
  last = -1;
  for (uint64_t free = 1000; free > 0; free -= 100) {
    fleet_.decode[0].free_pages = free;
    const double now = scorer.Seconds(query, candidate);
    EXPECT_GT(now, last);
    last = now;
  }
}

TEST_F(PlacementTest, EveryTermIsFiniteAndNotNegative) {
  std::mt19937 random(7);
  for (int i = 0; i < 500; ++i) {
    PrefillView p{.queued_tokens = random() % 100000, .tokens_per_s = static_cast<double>(random() % 3)};
    DecodeView d{.sequences = static_cast<uint32_t>(random() % 300),
                 .max_sequences = static_cast<uint32_t>(random() % 256),
                 .free_pages = random() % 100,
                 .total_pages = 100 * (random() % 2),
                 .kv_bytes_per_token = random() % 1000000};
    const PeerLink link{.bytes_per_s = static_cast<double>(random() % 2)};
    const std::vector<uint64_t> cached = {random() % 2000};
    const PlacementQuery query{.fleet = fleet_, .loads = *loads_, .prompt_tokens = 1000, .cached_tokens = cached};
    const Candidate c{.prefill_idx = 0, .prefill = &p, .decode = &d, .link = &link};
    const ScorerOptions options;
    for (const double seconds : {QueueScorer(options).Seconds(query, c), ComputeScorer(options).Seconds(query, c),
                                 WireScorer(options).Seconds(query, c), PressureScorer(options).Seconds(query, c)}) {
      EXPECT_TRUE(std::isfinite(seconds));
      EXPECT_GE(seconds, 0);
    }
  }
}

TEST_F(PlacementTest, DrainingFullAndUnconnectedAreNeverPicked) {
  fleet_.prefill[0].draining = true;
  full_ = {"d0"};
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair, "p1d1");
  fleet_.prefill[1].peers["d1"].decode_epoch = 9;  // a connection to another life of d1
  EXPECT_EQ(Place().status().code(), absl::StatusCode::kResourceExhausted);
  full_.clear();
  EXPECT_EQ(Place().value().decode->worker_id, "d0");
  fleet_.prefill[1].peers.clear();
  EXPECT_EQ(Place().status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(PlacementTest, FailedWorkersAreALastResort) {
  failed_ = {"p0", "d0"};
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair, "p1d1");
  failed_ = {"p0", "p1"};
  EXPECT_TRUE(Place().ok());
}

TEST_F(PlacementTest, WhatDoesNotFitIsNotSentThere) {
  fleet_.prefill[0].max_prompt_tokens = 500;
  fleet_.decode[1].max_sequence_tokens = 1000;
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair, "p1d0");
}

TEST(SoftmaxPickerTest, TemperatureSpreads) {
  std::vector<Candidate> candidates(3);
  candidates[0].cost_s = 1.0;
  candidates[1].cost_s = 1.5;
  candidates[2].cost_s = 3.0;
  std::mt19937_64 random(1);
  const auto count = [&](double temperature) {
    std::vector<int> counts(3);
    for (int i = 0; i < 3000; ++i) ++counts[SoftmaxPicker(temperature).Pick(candidates, random)];
    return counts;
  };
  EXPECT_EQ(count(0), (std::vector<int>{3000, 0, 0}));
  const std::vector<int> spread = count(1);
  EXPECT_GT(spread[0], spread[1]);
  EXPECT_GT(spread[1], spread[2]);
  EXPECT_GT(spread[2], 0);
}

TEST(LoadTrackerTest, HoldsReleaseOnce) {
  const auto tracker = std::make_shared<LoadTracker>();
  {
    LoadTracker::Hold a = tracker->Add("w", {.prefill_tokens = 10, .sequences = 1});
    LoadTracker::Hold b = std::move(a);
    a.Reset();
    EXPECT_EQ(tracker->Of("w").prefill_tokens, 10u);
    const LoadTracker::Hold c = tracker->Add("w", {.sequences = 2});
    EXPECT_EQ(tracker->Of("w").sequences, 3u);
  }
  EXPECT_EQ(tracker->Of("w").sequences, 0u);
}

}  // namespace
}  // namespace spl::router
