// Properties of placement: what must make a pair dearer, and what must never be picked.
#include "services/router/policies/placement.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "services/router/policies/foreign_load.h"
#include "services/router/policies/picker.h"
#include "services/router/policies/request_costs.h"

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
                             .reuse = reuse_,
                             .wire_share = wire_share_,
                             .held = held_.tokens > 0 ? &held_ : nullptr,
                             .fetch_bytes_per_s = fetch_bytes_per_s_,
                             .structured_output = structured_output_,
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
  std::vector<PredictedReuse> reuse_ = {{}, {}};
  double wire_share_ = 1, fetch_bytes_per_s_ = 0;
  bool structured_output_ = false;
  HeldPrompt held_;
  LoadTracker::Hold loads_hold_;
  std::set<std::string> full_;
  std::set<std::string> failed_;
  Placement placement_{{.seed = 42}};
};

TEST_F(PlacementTest, EqualPairsShareTheLoad) {
  const auto shares = Shares();
  ASSERT_EQ(shares.size(), 4u);
  for (const auto& [pair, count] : shares) EXPECT_GT(count, 20) << pair;
}

TEST_F(PlacementTest, StructuredOutputGoesWhereItIsKeptTo) {
  EXPECT_TRUE(Place().ok());
  structured_output_ = true;
  EXPECT_EQ(Place().status().code(), absl::StatusCode::kUnimplemented) << "all would answer without it";
  fleet_.prefill[1].structured_output = true;
  EXPECT_EQ(Place().status().code(), absl::StatusCode::kUnimplemented) << "no decode worker keeps to it";
  fleet_.decode[0].structured_output = true;
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair, "p1d0");
  failed_ = {"p1", "d0"};
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair, "p1d0") << "that others are left is no reason";
  fleet_.decode[0].draining = true;
  EXPECT_EQ(Place().status().code(), absl::StatusCode::kUnavailable) << "it is about to come back, or another";
}

TEST_F(PlacementTest, PrefixHitsAttract) {
  reuse_[1].prefix_tokens = 512;
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair[1], '1');
}

TEST_F(PlacementTest, SegmentsAttractLessThanAPrefixOfTheirLength) {
  reuse_[0].aligned_tokens = 512;
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair[1], '0');
  reuse_[1].prefix_tokens = 512;
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair[1], '1');
}

TEST_F(PlacementTest, OwnPagesAttractMoreThanTheStore) {
  reuse_[0] = {.prefix_tokens = 512, .fetched_tokens = 512};
  reuse_[1] = {.prefix_tokens = 512};
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair[1], '1');
}

// p0 would fetch in 0.256 s what p1 computes in 0.512 s; with a slow store computing is faster.
TEST_F(PlacementTest, FetchingIsWeighedAgainstComputing) {
  for (DecodeView& d : fleet_.decode) d.kv_bytes_per_token = 1'000'000;
  reuse_[0] = {.prefix_tokens = 512, .fetched_tokens = 512};
  fetch_bytes_per_s_ = 2e9;
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair[1], '0');
  fetch_bytes_per_s_ = 0.5e9;
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair[1], '1');
}

TEST_F(PlacementTest, HeadClassesMakeTheWireCheaper) {
  for (PrefillView& p : fleet_.prefill) p.peers["d1"].bytes_per_s = 1e8;  // 0.2 s of a dense prompt are not hidden
  loads_hold_ = loads_->Add("d0", {.sequences = 32});                     // and 0.16 s of pressure
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair.substr(2), "d0");
  wire_share_ = 0.2;
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair.substr(2), "d1");
}

// A turn goes back to the decode worker that has its history, unless that is busier than the bytes are worth.
TEST_F(PlacementTest, KeptPromptsAttractUntilTheirWorkerIsBusy) {
  for (PrefillView& p : fleet_.prefill) {
    for (auto& [id, link] : p.peers) link.writer.set_skips_held(true);
  }
  held_ = {.worker_id = "d1", .epoch = 1, .tokens = 960};
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair.substr(2), "d1");
  loads_hold_ = loads_->Add("d1", {.sequences = 32});  // 0.16 s of pressure, and 0.096 s of bytes
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair.substr(2), "d0");
  for (DecodeView& d : fleet_.decode) d.kv_bytes_per_token = 1'000'000;
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair.substr(2), "d1") << "0.96 s of bytes";
  // A worker that has restarted has nothing, and an older prefill worker sends everything.
  held_.epoch = 2;
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair.substr(2), "d0");
  held_.epoch = 1;
  for (PrefillView& p : fleet_.prefill) p.peers["d1"].writer.clear_skips_held();
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair.substr(2), "d0");
}

TEST(DecodeSessionsTest, ForgetsTheConversationThatWasNotedLongestAgo) {
  DecodeSessions sessions(2);
  sessions.Note("a", {"d0", 1, 64});
  sessions.Note("b", {"d0", 1, 128});
  sessions.Note("a", {"d1", 1, 192});
  sessions.Note("c", {"d0", 1, 64});
  EXPECT_EQ(sessions.size(), 2u);
  EXPECT_FALSE(sessions.Find("b").has_value());
  EXPECT_TRUE(sessions.Find("c").has_value());
  ASSERT_TRUE(sessions.Find("a").has_value());
  EXPECT_EQ(sessions.Find("a")->worker_id, "d1");
  EXPECT_EQ(sessions.Find("a")->tokens, 192u);
  EXPECT_FALSE(sessions.Find("").has_value());
}

// Tokens that the decode worker held are no sign of what a policy leaves out.
TEST(RequestCostsTest, HeldTokensAreNoSavingOfThePolicy) {
  RequestCosts costs;
  v1::ReuseOptions reuse;
  reuse.set_policy("exact");
  v1::Receipt receipt;
  receipt.set_cached_tokens(3000);
  receipt.set_computed_tokens(1000);
  receipt.set_held_tokens(2944);
  receipt.set_bytes_moved(uint64_t{4000 - 2944} * 100'000);
  for (int i = 0; i < 100; ++i) costs.Observe({reuse}, receipt, {.tokens_per_s = 0, .kv_bytes_per_token = 100'000});
  EXPECT_NEAR(costs.Of({reuse}, 4000).wire_share, 1, 1e-6);
}

// What a hit saves is worth less, the longer the holder's queue is, but never nothing and never less than without a
// hit.
TEST_F(PlacementTest, CreditDecaysAtAnOverloadedHolder) {
  reuse_[0].prefix_tokens = 800;
  const PlacementQuery query{.fleet = fleet_, .loads = *loads_, .prompt_tokens = 1000, .reuse = reuse_};
  Candidate holder{.prefill_idx = 0, .prefill = &fleet_.prefill[0]};
  const ComputeScorer scorer({.credit_decay = 1});
  EXPECT_NEAR(scorer.Seconds(query, holder), 0.2, 1e-9);
  holder.excess_queue_s = 1;  // as long as computing the prompt takes
  EXPECT_NEAR(scorer.Seconds(query, holder), 0.6, 1e-9);
  EXPECT_NEAR(ComputeScorer({.credit_decay = 0}).Seconds(query, holder), 0.2, 1e-9);
  holder.excess_queue_s = 1e9;
  EXPECT_LE(scorer.Seconds(query, holder), 1);
}

TEST_F(PlacementTest, DecodeAdmissionLeavesRoomToGrow) {
  const Placement placement({.max_decode_load = 0.9, .seed = 1});
  const auto place = [&](uint32_t prompt) {
    return placement.Place(
        {.fleet = fleet_, .loads = *loads_, .prompt_tokens = prompt, .total_tokens = prompt + 1, .reuse = reuse_});
  };
  for (DecodeView& d : fleet_.decode) d.max_sequence_tokens = 10'000, d.sequences = 3, d.free_pages = 150;
  EXPECT_TRUE(place(400).ok());
  EXPECT_EQ(place(600).status().code(), absl::StatusCode::kResourceExhausted);
  fleet_.decode[1].sequences = 0;  // an idle worker takes whatever fits
  fleet_.decode[1].free_pages = 1000;
  EXPECT_EQ(place(9'500).value().decode->worker_id, "d1");
}

// What was routed since the last poll fills pages, too.
TEST_F(PlacementTest, PagesOfRoutedRequestsCountBetweenPolls) {
  for (DecodeView& d : fleet_.decode) d.max_sequence_tokens = 10'000;
  fleet_.decode[1].free_pages = 900;
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair.substr(2), "d0");
  loads_hold_ = loads_->Add("d0", {.prefill_tokens = 2'000, .sequences = 1});
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair.substr(2), "d1");
}

TEST_F(PlacementTest, RoundRobinTakesTurns) {
  const Placement placement({.policy = PlacementPolicy::kRoundRobin, .seed = 1});
  reuse_[1].prefix_tokens = 900;
  std::vector<std::string> order;
  for (int i = 0; i < 4; ++i)
    order.push_back(placement.Place({.fleet = fleet_, .loads = *loads_, .prompt_tokens = 1000, .reuse = reuse_})
                        .value()
                        .prefill->worker_id);
  EXPECT_EQ(order, (std::vector<std::string>{"p0", "p1", "p0", "p1"}));
}

// A fleet too large for all pairs: the same choice as over all pairs, where links are equal.
TEST_F(PlacementTest, LargeFleetsAreShortlisted) {
  fleet_ = {};
  std::mt19937 random(3);
  for (int i = 0; i < 60; ++i) {
    const std::string n = std::to_string(i);
    fleet_.prefill.push_back(
        {.worker_id = "p" + n, .epoch = 1, .queued_tokens = random() % 5000, .tokens_per_s = 1000});
    fleet_.decode.push_back({.worker_id = "d" + n,
                             .epoch = 1,
                             .sequences = static_cast<uint32_t>(random() % 60),
                             .max_sequences = 64,
                             .step_seconds = 0.01});
  }
  for (const bool pods : {false, true}) {
    for (size_t p = 0; p < 60; ++p) {
      fleet_.prefill[p].peers.clear();
      for (size_t d = 0; d < 60; ++d) {
        if (!pods || d % 10 == p % 10) fleet_.prefill[p].peers[fleet_.decode[d].worker_id] = {.decode_epoch = 1};
      }
    }
    reuse_.assign(60, {});
    const Candidate chosen = Place(500).value();
    double best = 1e9;
    const PlacementQuery query{.fleet = fleet_, .loads = *loads_, .prompt_tokens = 500, .reuse = reuse_};
    for (size_t p = 0; p < 60; ++p) {
      for (const auto& [id, link] : fleet_.prefill[p].peers) {
        const DecodeView& d = fleet_.decode[static_cast<size_t>(std::stoi(id.substr(1)))];
        const Candidate c{.prefill_idx = p, .prefill = &fleet_.prefill[p], .decode = &d, .link = &link};
        best = std::min(best, QueueScorer({}).Seconds(query, c) + PressureScorer({}).Seconds(query, c));
      }
    }
    EXPECT_NEAR(chosen.cost_s - 0.5, best, 1e-9) << "pods " << pods;
    EXPECT_NEAR(chosen.expected_s, chosen.cost_s, 1e-9);
  }
}

TEST_F(PlacementTest, AQueueOutweighsASmallerHit) {
  reuse_[1].prefix_tokens = 512;
  fleet_.prefill[1].queued_tokens = 600;
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair[1], '0');
}

TEST_F(PlacementTest, WhatWasJustRoutedCountsAsLoad) {
  const LoadTracker::Hold hold = loads_->Add("p0", {.prefill_tokens = 500});
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair[1], '1');
}

// A prompt of 50,000 tokens takes as long as nine of 10,000 here, not as five: a queue is not its tokens.
TEST_F(PlacementTest, LongPromptsInAQueueTakeTheirAttentionsTime) {
  for (PrefillView& p : fleet_.prefill) p.first_tokens_per_s = 1'000, p.pair_cost = 4e-5;
  const auto place_at = [&](const char* worker, uint32_t tokens) {
    const PlacementQuery query{.fleet = fleet_, .loads = *loads_, .prompt_tokens = tokens, .reuse = reuse_};
    PlacedRequest placed{
        .pair = {.prefill = worker[1] == '0' ? &fleet_.prefill[0] : &fleet_.prefill[1], .decode = fleet_.decode.data()},
        .tokens_to_compute = tokens};
    placed.pair.prefill_s = PrefillSeconds({}, query, placed.pair);
    return Charge(*loads_, query, placed, 1);
  };
  const PlacedLoad long_one = place_at("p0", 50'000);
  EXPECT_NEAR(loads_->Of("p0").prefill_s, 50 + 50, 1e-9);
  std::vector<PlacedLoad> shorter;
  for (int i = 0; i < 8; ++i) shorter.push_back(place_at("p1", 10'000));
  EXPECT_NEAR(loads_->Of("p1").prefill_s, 8 * (10 + 2), 1e-9);  // and more tokens
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair.substr(0, 2), "p1");
  shorter.push_back(place_at("p1", 10'000));
  for (const auto& [pair, count] : Shares()) EXPECT_EQ(pair.substr(0, 2), "p0");
  shorter.clear();
  EXPECT_EQ(loads_->Of("p1").prefill_s, 0);
}

// Fetching keeps a worker from the next prompt as computing does.
TEST_F(PlacementTest, FetchingCountsInTheQueue) {
  fetch_bytes_per_s_ = 1e9;
  reuse_[0] = reuse_[1] = {.prefix_tokens = 900, .fetched_tokens = 900};
  const Candidate placed = Place().value();
  EXPECT_NEAR(placed.prefill_s, 0.1 + 900 * 100'000 / 1e9, 1e-9);
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
    const uint32_t prefix = random() % 2000;
    const std::vector<PredictedReuse> reuse = {{.prefix_tokens = prefix,
                                                .aligned_tokens = static_cast<uint32_t>(random() % 2000),
                                                .fetched_tokens = static_cast<uint32_t>(random() % (prefix + 1))}};
    const PlacementQuery query{.fleet = fleet_, .loads = *loads_, .prompt_tokens = 1000, .reuse = reuse};
    const Candidate c{.prefill_idx = 0,
                      .prefill = &p,
                      .decode = &d,
                      .link = &link,
                      .excess_queue_s = static_cast<double>(random() % 10)};
    const ScorerOptions options;
    for (const double seconds :
         {QueueScorer(options).Seconds(query, c), ComputeScorer(options).Seconds(query, c),
          FetchScorer(options).Seconds(query, c), WireScorer(options).Seconds(query, c),
          SlowdownScorer(options).Seconds(query, c), PressureScorer(options).Seconds(query, c)}) {
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

// Two decode workers of which one prefills prompts of up to 200 new tokens itself, at a tenth of the pool's rate.
class LocalPlacementTest : public PlacementTest {
 protected:
  LocalPlacementTest() {
    PrefillView local{.worker_id = "d0/local", .epoch = 1, .tokens_per_s = 100, .max_prompt_tokens = 4096};
    local.local = PrefillView::Local{.decode_id = "d0", .max_new_tokens = 200, .slice_tokens = 64};
    local.peers["d0"] = {.decode_epoch = 1, .transport = "in place"};
    fleet_.local.push_back(local);
    reuse_ = {{}, {}, {}};
  }
  bool IsLocal(uint32_t prompt_tokens) { return Place(prompt_tokens).value().prefill->local.has_value(); }
  // Both prefill workers are busy for so long.
  void Busy(uint64_t tokens) {
    for (PrefillView& p : fleet_.prefill) p.queued_tokens = tokens;
  }
};

TEST_F(LocalPlacementTest, ShortPromptsStayWhereThatIsFaster) {
  EXPECT_FALSE(IsLocal(150)) << "0.15 s in the pool, 1.5 s here";
  for (DecodeView& d : fleet_.decode) d.kv_bytes_per_token = 10'000'000;
  Busy(3000);
  const Candidate chosen = Place(150).value();
  EXPECT_EQ(chosen.prefill->worker_id, "d0/local");
  EXPECT_EQ(chosen.prefill_idx, 2u);
  EXPECT_EQ(chosen.decode->worker_id, "d0");
  EXPECT_TRUE(chosen.link->in_place());
  EXPECT_NEAR(chosen.expected_s, 1.5, 0.01) << "nothing is sent";
}

TEST_F(LocalPlacementTest, OnlyNewTokensCount) {
  Busy(100'000);
  EXPECT_TRUE(IsLocal(200));
  EXPECT_FALSE(IsLocal(201));
  reuse_[2].prefix_tokens = 960;
  EXPECT_TRUE(IsLocal(1160));
  EXPECT_FALSE(IsLocal(1161));
  reuse_[2] = {.aligned_tokens = 960};  // a copied token costs a quarter
  EXPECT_FALSE(IsLocal(1160));
  EXPECT_TRUE(IsLocal(900));
}

TEST_F(LocalPlacementTest, RunningSequencesMakeItDearer) {
  const PlacementQuery query{.fleet = fleet_, .loads = *loads_, .prompt_tokens = 100, .reuse = reuse_};
  const SlowdownScorer scorer({.slowdown_share = 0.25});
  Candidate candidate{.prefill_idx = 2, .prefill = &fleet_.local[0], .decode = &fleet_.decode[0]};
  EXPECT_EQ(scorer.Seconds(query, candidate), 0) << "nobody is there";
  fleet_.decode[0].sequences = fleet_.decode[0].running = 4;
  // Two slices wait for a step of 10 ms each; four sequences wait for a second.
  EXPECT_NEAR(scorer.Seconds(query, candidate), 0.02 + 0.25 * 4 * 1, 1e-9);
  candidate.prefill_idx = 0;
  candidate.prefill = &fleet_.prefill[0];
  EXPECT_EQ(scorer.Seconds(query, candidate), 0) << "a prefill worker slows nobody down";
  Busy(1500);
  EXPECT_FALSE(IsLocal(100)) << "1.6 s in the pool, 1 s here and 1 s for those that run";
  fleet_.decode[0].running = 1;
  EXPECT_TRUE(IsLocal(100));
}

TEST_F(LocalPlacementTest, ItsOwnQueueCounts) {
  Busy(3000);
  EXPECT_TRUE(IsLocal(100));
  loads_hold_ = loads_->Add("d0/local", {.prefill_tokens = 400});
  EXPECT_FALSE(IsLocal(100));
}

TEST_F(LocalPlacementTest, TheWorkerMustHaveRoomAndBeThere) {
  Busy(100'000);
  ASSERT_TRUE(IsLocal(100));
  full_ = {"d0"};
  EXPECT_FALSE(IsLocal(100));
  full_.clear();
  failed_ = {"d0/local"};
  EXPECT_FALSE(IsLocal(100)) << "it refused this prompt";
  failed_.clear();
  fleet_.local[0].draining = true;
  EXPECT_FALSE(IsLocal(100));
  fleet_.local[0].draining = false;
  fleet_.local[0].peers["d0"].decode_epoch = 9;
  EXPECT_FALSE(IsLocal(100));
}

TEST_F(LocalPlacementTest, WithoutThePoolOnlyShortPromptsAreServed) {
  fleet_.prefill.clear();
  reuse_ = {{}};
  EXPECT_TRUE(IsLocal(200));
  EXPECT_EQ(Place(201).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(fleet_.Serves()) << "the pool may be about to come";
  fleet_.had_pair = true;
  EXPECT_TRUE(fleet_.Serves());
  EXPECT_FALSE(fleet_.HasUsablePair());
  fleet_.local.clear();
  EXPECT_FALSE(fleet_.Serves());
}

// A pool that failed this request is better than a place to which the prompt is too long.
TEST_F(LocalPlacementTest, APlaceThatCannotServeIsNoWayOut) {
  failed_ = {"p0", "p1"};
  EXPECT_FALSE(IsLocal(1000));
  EXPECT_TRUE(IsLocal(100));
}

TEST_F(LocalPlacementTest, OtherPoliciesKnowPrefillWorkersOnly) {
  Busy(100'000);
  for (const PlacementPolicy policy :
       {PlacementPolicy::kRoundRobin, PlacementPolicy::kLeastLoaded, PlacementPolicy::kPrefixOnly}) {
    const Placement placement({.policy = policy, .seed = 1});
    for (int i = 0; i < 4; ++i) {
      EXPECT_FALSE(
          placement
              .Place({.fleet = fleet_, .loads = *loads_, .prompt_tokens = 100, .total_tokens = 101, .reuse = reuse_})
              .value()
              .prefill->local.has_value());
    }
  }
}

// Of a fleet that is shortlisted every such worker is looked at.
TEST_F(LocalPlacementTest, LargeFleetsHaveLocalPlacesToo) {
  fleet_ = {};
  for (int i = 0; i < 60; ++i) {
    const std::string n = std::to_string(i);
    fleet_.prefill.push_back({.worker_id = "p" + n, .epoch = 1, .queued_tokens = 50'000, .tokens_per_s = 1000});
    fleet_.decode.push_back({.worker_id = "d" + n, .epoch = 1, .max_sequences = 64, .step_seconds = 0.01});
    PrefillView local{.worker_id = "d" + n + "/local", .epoch = 1, .tokens_per_s = 900};
    local.queued_tokens = i == 37 ? 0 : 5000;
    local.local = PrefillView::Local{.decode_id = "d" + n, .max_new_tokens = 200, .slice_tokens = 64};
    local.peers["d" + n] = {.decode_epoch = 1};
    fleet_.local.push_back(local);
  }
  for (PrefillView& p : fleet_.prefill) {
    for (const DecodeView& d : fleet_.decode) p.peers[d.worker_id] = {.decode_epoch = 1};
  }
  reuse_.assign(120, {});
  const Candidate chosen = Place(100).value();
  EXPECT_EQ(chosen.prefill->worker_id, "d37/local");
  EXPECT_EQ(chosen.decode->worker_id, "d37");
  EXPECT_FALSE(IsLocal(300));
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

// A poll's count is mostly this router's own, which it knows better: only the rest is taken from it.
TEST(ForeignLoadTest, IsWhatAPollCountsBeyondOurOwn) {
  const auto loads = std::make_shared<LoadTracker>();
  ForeignLoad foreign;
  const auto poll = [&](uint64_t queued, uint64_t epoch = 1) {
    auto fleet = std::make_shared<FleetSnapshot>();
    fleet->prefill.push_back(
        {.worker_id = "p0", .epoch = epoch, .queued_tokens = queued, .asked_at = LoadTracker::Clock::now()});
    foreign.Update(fleet, *loads);
    return foreign.Of(*fleet)->at(0);
  };
  LoadTracker::Hold ours = loads->Add("p0", {.prefill_tokens = 500});
  EXPECT_EQ(poll(500), 0u);
  EXPECT_EQ(poll(800), 300u);
  ours.Reset();
  EXPECT_EQ(poll(800), 300u) << "no news of it: still the old count";
  EXPECT_EQ(poll(100), 100u);
  EXPECT_EQ(poll(0), 0u);
  EXPECT_EQ(poll(70, 2), 70u) << "restarted";
}

// A worker counts a prompt, which ends before the answer is read: nobody else's prompt waits there.
TEST(ForeignLoadTest, OurPromptThatEndedDuringAPollIsOurs) {
  const auto loads = std::make_shared<LoadTracker>();
  ForeignLoad foreign;
  const auto answer = [&](uint64_t queued, LoadTracker::Clock::time_point asked_at) {
    auto fleet = std::make_shared<FleetSnapshot>();
    fleet->prefill.push_back({.worker_id = "p0", .epoch = 1, .queued_tokens = queued, .asked_at = asked_at});
    foreign.Update(fleet, *loads);
    return foreign.Of(*fleet)->at(0);
  };
  EXPECT_EQ(answer(0, LoadTracker::Clock::now()), 0u);
  LoadTracker::Hold ours = loads->Add("p0", {.prefill_tokens = 700});
  LoadTracker::Hold elsewhere = loads->Add("p1", {.prefill_tokens = 900});
  const LoadTracker::Clock::time_point asked_at = LoadTracker::Clock::now();
  ours.Reset();
  elsewhere.Reset();
  EXPECT_EQ(answer(950, asked_at), 250u);
  EXPECT_EQ(answer(700, LoadTracker::Clock::now()), 700u) << "it had ended when this poll was sent";
}

// Between a snapshot and the Update that follows, decisions are made by what is known of the same life.
TEST(ForeignLoadTest, OfANewerSnapshotIsThatOfTheLastUpdate) {
  const auto loads = std::make_shared<LoadTracker>();
  ForeignLoad foreign;
  const auto fleet_of = [](uint64_t queued, uint64_t epoch) {
    auto fleet = std::make_shared<FleetSnapshot>();
    fleet->prefill.push_back({.worker_id = "new", .epoch = 1, .queued_tokens = 30});
    fleet->prefill.push_back({.worker_id = "p0", .epoch = epoch, .queued_tokens = queued});
    return fleet;
  };
  auto first = std::make_shared<FleetSnapshot>();
  first->prefill.push_back({.worker_id = "p0", .epoch = 1, .queued_tokens = 40});
  foreign.Update(first, *loads);
  EXPECT_EQ(*foreign.Of(*fleet_of(900, 1)), (std::vector<uint64_t>{30, 40}));
  EXPECT_EQ(*foreign.Of(*fleet_of(900, 2)), (std::vector<uint64_t>{30, 900})) << "restarted";
}

TEST(RequestCostsTest, LearnFromReceipts) {
  RequestCosts costs;
  v1::ReuseOptions redknot;
  redknot.set_policy("redknot");
  EXPECT_EQ(costs.Of({redknot}, 4000).wire_share, 1);
  for (int i = 0; i < 60; ++i) {
    v1::Receipt receipt;
    receipt.set_cached_tokens(1000);
    receipt.set_aligned_tokens(2000);
    receipt.set_computed_tokens(1000);
    receipt.set_bytes_moved(4000ull * 1000 / 5);
    receipt.set_bytes_fetched(8 << 20);
    receipt.set_fetch_seconds(0.004);
    receipt.set_prefill_seconds(0.16);  // of 1,600 tokens: 600 for the 2,000 aligned ones
    costs.Observe({redknot}, receipt, {.tokens_per_s = 10'000, .kv_bytes_per_token = 1000});
  }
  EXPECT_NEAR(costs.Of({redknot}, 40).wire_share, 0.2, 0.01);
  EXPECT_NEAR(costs.Of({redknot}, 40'000).aligned_cost, 0.3, 0.01);
  EXPECT_NEAR(costs.Of({v1::ReuseOptions()}, 4000).fetch_bytes_per_s, (8 << 20) / 0.004, 1);
  EXPECT_EQ(costs.Of({v1::ReuseOptions()}, 4000).wire_share, 1) << "another policy";
}

// Short prompts are computed exactly, whatever could be copied; long ones are nearly free. Neither says anything of the
// method by its name.
TEST(RequestCostsTest, AutoCostsWhatItChoosesForPromptsOfThisLength) {
  RequestCosts costs;
  v1::ReuseOptions reuse;
  reuse.set_policy("sparsex");  // what the router resolves auto to
  const RequestCost by_name = costs.Of({reuse}, 700);
  for (int i = 0; i < 60; ++i) {
    v1::Receipt left;
    left.set_reuse_policy("exact");
    left.set_computed_tokens(700);
    left.set_prefill_seconds(0.07);
    left.mutable_choice()->set_why("little_to_gain");
    costs.Observe({reuse, true}, left, {.tokens_per_s = 10'000, .kv_bytes_per_token = 1000});
    v1::Receipt used;
    used.set_reuse_policy("sparsex");
    used.set_aligned_tokens(8000);
    used.set_computed_tokens(500);
    used.set_prefill_seconds(0.09);  // of 900 tokens: 400 for the 8,000 aligned ones
    used.mutable_choice()->set_why("default");
    costs.Observe({reuse, true}, used, {.tokens_per_s = 10'000, .kv_bytes_per_token = 1000});
  }
  EXPECT_NEAR(costs.Of({reuse, true}, 600).aligned_cost, 1, 0.01);
  EXPECT_NEAR(costs.Of({reuse, true}, 9000).aligned_cost, 0.05, 0.01);
  EXPECT_EQ(costs.Of({reuse}, 600).aligned_cost, by_name.aligned_cost);
  EXPECT_EQ(costs.Of({reuse}, 9000).aligned_cost, by_name.aligned_cost);
}

// A contract may leave the copies of a method that the request names.
TEST(RequestCostsTest, AContractCostsWhatItRuns) {
  RequestCosts costs;
  v1::ReuseOptions reuse;
  reuse.set_policy("sparsex");
  reuse.set_quality("0.99");
  v1::Receipt left;
  left.set_reuse_policy("exact");
  left.set_computed_tokens(6000);
  left.mutable_choice()->set_why("no_record");
  for (int i = 0; i < 60; ++i) costs.Observe({reuse}, left, {.tokens_per_s = 10'000, .kv_bytes_per_token = 1000});
  EXPECT_NEAR(costs.Of({reuse}, 6000).aligned_cost, 1, 0.01);
  left.mutable_choice()->set_why("nothing_to_copy");
  v1::ReuseOptions other = reuse;
  other.set_quality("0.9");
  for (int i = 0; i < 60; ++i) costs.Observe({other}, left, {.tokens_per_s = 10'000, .kv_bytes_per_token = 1000});
  EXPECT_EQ(costs.Of({other}, 6000).aligned_cost, RequestCost().aligned_cost) << "there was nothing to copy";
}

}  // namespace
}  // namespace spl::router
