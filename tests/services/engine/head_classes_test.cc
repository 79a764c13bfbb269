#include "services/engine/model/head_classes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "services/engine/model/head_class_import.h"
#include "tests/support/head_class_maps.h"

namespace spl::engine {
namespace {

using nlohmann::json;
using testing::HasSubstr;

const HeadClass kGlobal{};
HeadClass Local(int32_t window, int32_t sinks) { return {false, window, sinks}; }

std::string ErrorOf(const json& map) { return std::string(HeadClassMap::Parse(map.dump(), "map").status().message()); }

json TwoByTwo() {
  return json::parse(R"({"format": "splice-head-classes-1", "num_layers": 2, "num_kv_heads": 2,
                         "class": [["global", "local"], ["local", "local"]],
                         "window": [[0, 256], [100, 1]], "sinks": [[0, 64], [0, 4]]})");
}

TEST(HeadClassMap, SaysWhatEveryHeadSeesAndKeeps) {
  const auto map = HeadClassMap::Parse(TwoByTwo().dump(), "map");
  ASSERT_TRUE(map.ok()) << map.status();
  EXPECT_EQ(map->at(0, 0), kGlobal);
  EXPECT_EQ(map->at(0, 1), Local(256, 64));
  EXPECT_EQ(map->at(1, 1), Local(1, 4));
  EXPECT_EQ(map->at(0, 0).visibility().rule, kernels::VisibilityRule::kFull);
  const kernels::HeadVisibility local = map->at(0, 1).visibility();
  EXPECT_EQ(local.rule, kernels::VisibilityRule::kBand);
  EXPECT_EQ(local.window, 256);
  EXPECT_EQ(local.num_sinks, 64);
  EXPECT_EQ(map->global_share(), 0.25);
  EXPECT_EQ(map->kept_share(1000), (1000 + 320 + 100 + 5) / 4000.0);
  EXPECT_EQ(map->kept_share(10), (10 + 10 + 10 + 5) / 40.0) << "never more than there is";
}

// A head may see everything in a prompt, and keep a window of it.
TEST(HeadClassMap, SaysWhatHeadsSeeInPrefill) {
  json text = TwoByTwo();
  text["num_layers"] = 3;
  for (const char* table : {"class", "window", "sinks"}) text[table].push_back(text[table][1]);
  const auto plain = HeadClassMap::Parse(text.dump(), "map");
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ(plain->in_prefill(2, 0), Local(100, 0));
  EXPECT_FALSE(json::parse(plain->ToJson()).contains("prefill"));
  text["prefill"] = json::parse(R"([["global", "local"], ["global", "local"], ["local", "global"]])");
  const auto map = HeadClassMap::Parse(text.dump(), "map");
  ASSERT_TRUE(map.ok()) << map.status();
  for (const auto& read : {*map, HeadClassMap::Parse(map->ToJson(), "written").value()}) {
    EXPECT_EQ(read.in_prefill(2, 0), Local(100, 0));
    EXPECT_EQ(read.in_prefill(2, 1), kGlobal);
    EXPECT_EQ(read.served(2, 1), Local(1, 4)) << "what is kept is the class alone";
    EXPECT_EQ(read.in_prefill(1, 1), kGlobal) << "the first layers see everything";
  }
  EXPECT_EQ(map->kept_share(1000), plain->kept_share(1000));
  EXPECT_EQ(map->digest(), plain->digest()) << "workers leave out the same tokens";
  text["prefill"][0][0] = "local";
  EXPECT_THAT(ErrorOf(text), HasSubstr("prefill: layer 0 head 0 is local, and its class is global"));
  text["prefill"][0][0] = "wide";
  EXPECT_THAT(ErrorOf(text), HasSubstr("prefill: layer 0 head 0 must be"));
}

// The first two layers are global, unless the map has learned what they need.
TEST(HeadClassMap, SaysHowManyFirstLayersSeeEverything) {
  json text = TwoByTwo();
  const auto plain = HeadClassMap::Parse(text.dump(), "map");
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ(plain->dense_layers(), 2);
  EXPECT_EQ(plain->served(1, 1), kGlobal);
  EXPECT_FALSE(json::parse(plain->ToJson()).contains("dense_layers"));
  text["dense_layers"] = 1;
  const auto map = HeadClassMap::Parse(text.dump(), "map");
  ASSERT_TRUE(map.ok()) << map.status();
  for (const auto& read : {*map, HeadClassMap::Parse(map->ToJson(), "written").value()}) {
    EXPECT_EQ(read.served(0, 1), kGlobal);
    EXPECT_EQ(read.served(1, 1), Local(1, 4));
    EXPECT_EQ(read.in_prefill(1, 1), Local(1, 4));
    EXPECT_EQ(read.digest(), map->digest());
  }
  EXPECT_NE(map->digest(), plain->digest()) << "workers would leave out other tokens";
  text["dense_layers"] = 3;
  EXPECT_THAT(ErrorOf(text), HasSubstr("dense_layers"));
}

// docs/methods/redknot.md, "What is sent": the ratio of bytes of the presets is 1 / (share + (1 - share) (window +
// sinks) / tokens).
TEST(HeadClassMap, KeptShareIsTheFormulaOfThePaper) {
  HeadProfile profile;
  profile.num_tokens = 1;
  profile.edge_mass.resize(1600);
  profile.prefix_shift.resize(1600);
  for (size_t i = 0; i < 1600; ++i) profile.edge_mass[i] = static_cast<float>(i) / 1600;
  profile.edge_mass_q99 = profile.edge_mass;
  HeadPreset preset{.name = "test", .global_share = 0.15, .window = 256, .sinks = 4};
  EXPECT_NEAR(1 / HeadClassMap::FromProfile(40, 40, profile, preset).kept_share(8192), 5.65, 0.005);
  preset = {.name = "test", .global_share = 0.5, .window = 256, .sinks = 64};
  EXPECT_NEAR(1 / HeadClassMap::FromProfile(40, 40, profile, preset).kept_share(131072), 2.00, 0.005);
}

TEST(HeadClassMap, TheHeadsThatNeedMostAreGlobal) {
  HeadProfile profile{.num_tokens = 2048,
                      .edge_mass = {0.1f, 0.4f, 0.2f, 0.2f, 0.0f, 0.2f, 0.1f, 0.0f},
                      .edge_mass_q99 = std::vector<float>(8, 0.5f),
                      .prefix_shift = {0.0f, 0.0f, 0.0f, 0.0f, 0.3f, 0.0f, 0.1f, 0.0f}};
  HeadRanking ranking = HeadRanking::kCombined;
  const auto globals = [&](const HeadPreset& preset) {
    HeadPreset ranked = preset;
    ranked.ranking = ranking;
    const HeadClassMap map = HeadClassMap::FromProfile(4, 2, profile, ranked);
    std::string text;
    for (int32_t layer = 0; layer < 4; ++layer) {
      for (int32_t head = 0; head < 2; ++head) text += map.at(layer, head).is_global ? 'g' : '.';
    }
    return text;
  };
  // 0.4, then the shift of 0.3, then the first of three ties.
  EXPECT_EQ(globals({.name = "t", .global_share = 3.0 / 8}), ".gg.g...");
  EXPECT_EQ(globals({.name = "t", .global_share = 1.0 / 8, .dense_prefix_layers = 1}), "gg......");
  EXPECT_EQ(globals({.name = "t", .global_share = 3.0 / 8, .dense_prefix_layers = 1}), "gg..g...");
  EXPECT_EQ(globals({.name = "t", .global_share = 0}), "........");
  EXPECT_EQ(globals({.name = "t", .global_share = 1}), "gggggggg");
  // By what a window loses at its worst, and where texts are answered.
  ranking = HeadRanking::kEdge;
  profile.edge_mass_q99 = {0.1f, 0.2f, 0.9f, 0.0f, 0.0f, 0.3f, 0.0f, 0.0f};
  EXPECT_EQ(globals({.name = "t", .global_share = 2.0 / 8}), "..g..g..");
  profile.answer_mass = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.5f, 0.0f};
  EXPECT_EQ(globals({.name = "t", .global_share = 1.0 / 8}), "......g.");
}

TEST(HeadClassMap, WhatWasWrittenIsRead) {
  HeadProfile profile{.num_tokens = 2048,
                      .edge_mass = {0.125f, 0.5f, 0.25f, 0.0f},
                      .edge_mass_q99 = {0.25f, 0.75f, 0.5f, 0.125f},
                      .prefix_shift = {0.0f, 1.0f, 0.0625f, 0.5f},
                      .answer_mass = {0.0f, 0.25f, 0.5f, 1.0f}};
  HeadClassMap map = HeadClassMap::FromProfile(2, 2, profile, *FindHeadPreset("mid"));
  chunk::Digest fingerprint{};
  fingerprint[0] = 0xab;
  map.set_model_fingerprint(fingerprint);
  const auto again = HeadClassMap::Parse(map.ToJson(), "again");
  ASSERT_TRUE(again.ok()) << again.status() << map.ToJson();
  EXPECT_EQ(again->digest(), map.digest());
  EXPECT_EQ(again->preset(), "mid");
  EXPECT_EQ(again->profile().edge_mass, profile.edge_mass);
  EXPECT_EQ(again->profile().edge_mass_q99, profile.edge_mass_q99);
  EXPECT_EQ(again->profile().prefix_shift, profile.prefix_shift);
  EXPECT_EQ(again->profile().answer_mass, profile.answer_mass);
  EXPECT_EQ(again->ToJson(), map.ToJson());
  EXPECT_TRUE(again->CheckModel(2, 2, fingerprint).ok());
}

TEST(HeadClassMap, TheDigestIsThatOfWhatIsLeftOut) {
  const auto digest = [](const HeadClass& last) { return HeadClassMap(1, 2, {kGlobal, last}).digest(); };
  EXPECT_EQ(digest(Local(64, 4)), digest(Local(64, 4)));
  EXPECT_NE(digest(Local(64, 4)), digest(Local(64, 5)));
  EXPECT_NE(digest(Local(64, 4)), digest(Local(65, 4)));
  EXPECT_NE(digest(Local(64, 4)), digest(kGlobal));
  EXPECT_NE(test::AllGlobal(1, 2).digest(), test::AllGlobal(2, 1).digest());
}

TEST(HeadClassMap, AnotherModelIsRefused) {
  HeadClassMap map = test::AllGlobal(2, 4);
  chunk::Digest ours{}, theirs{};
  ours[31] = 1;
  theirs[31] = 2;
  EXPECT_TRUE(map.CheckModel(2, 4, ours).ok()) << "without a fingerprint the shape decides";
  map.set_model_fingerprint(ours);
  EXPECT_TRUE(map.CheckModel(2, 4, ours).ok());
  const absl::Status other = map.CheckModel(2, 4, theirs);
  EXPECT_EQ(other.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(other.ToString(), HasSubstr("fingerprint"));
  EXPECT_THAT(map.CheckModel(2, 8, ours).ToString(), HasSubstr("2 layers of 4 KV heads, the model has 2 of 8"));
}

TEST(HeadClassMap, BadFilesNameTheField) {
  EXPECT_THAT(std::string(HeadClassMap::Parse("[", "f.json").status().message()), HasSubstr("f.json: is not JSON"));
  json map = TwoByTwo();
  map["format"] = "other";
  EXPECT_THAT(ErrorOf(map), HasSubstr("map: format: must be"));
  map = TwoByTwo();
  map.erase("window");
  EXPECT_THAT(ErrorOf(map), HasSubstr("map: window: is missing"));
  map = TwoByTwo();
  map["window"][1][0] = 0;
  EXPECT_THAT(ErrorOf(map), HasSubstr("window: layer 1 head 0 is local: its window must lie in [1, "));
  map["window"][1][0] = 1.5;
  EXPECT_THAT(ErrorOf(map), HasSubstr("got 1.5"));
  map = TwoByTwo();
  map["sinks"][0][1] = -1;
  EXPECT_THAT(ErrorOf(map), HasSubstr("sinks: layer 0 head 1"));
  map = TwoByTwo();
  map["class"][1] = json::array({"local"});
  EXPECT_THAT(ErrorOf(map), HasSubstr("class: layer 1 must be a list of 2 heads"));
  map["class"][1] = json::array({"local", "loud"});
  EXPECT_THAT(ErrorOf(map), HasSubstr("layer 1 head 1 must be \"global\" or \"local\", got \"loud\""));
  map["class"] = json::parse(R"([["local", "local"]])");
  EXPECT_THAT(ErrorOf(map), HasSubstr("class: must have 2 layers (num_layers), got 1"));
  map = TwoByTwo();
  map["num_layers"] = 0;
  EXPECT_THAT(ErrorOf(map), HasSubstr("num_layers: must be an integer between 1 and 4096, got 0"));
  map = TwoByTwo();
  map["model_fingerprint"] = "abc";
  EXPECT_THAT(ErrorOf(map), HasSubstr("model_fingerprint: must be 64 hexadecimal digits"));
  map = TwoByTwo();
  map["profile"] = {{"num_tokens", 5}, {"edge_mass", {{0, 0}, {0, 3}}}};
  EXPECT_THAT(ErrorOf(map), HasSubstr("profile.edge_mass: layer 1 head 1 must be a number in [0, 2], got 3"));
  EXPECT_EQ(HeadClassMap::Load("/nowhere/head_classes.json").status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(FindHeadPreset("wild").status().message()), HasSubstr("safe, mid, paper"));
}

TEST(HeadClassImport, DuoAttentionGatesAboveTheQuantileAreGlobal) {
  const HeadPreset half{.name = "safe", .global_share = 0.5, .window = 256, .sinks = 64};
  const auto map = ImportDuoAttention("0.91\t0.97\n0.2\t1.0\r\n\n", "gates.tsv", half);
  ASSERT_TRUE(map.ok()) << map.status();
  EXPECT_EQ(map->num_layers(), 2);
  EXPECT_EQ(map->at(0, 0), Local(256, 64)) << "a gate above 0.5 is not enough";
  EXPECT_EQ(map->at(0, 1), kGlobal);
  EXPECT_EQ(map->at(1, 0), Local(256, 64));
  EXPECT_EQ(map->at(1, 1), kGlobal);
  EXPECT_EQ(map->preset(), "duoattention-safe");
  const auto error = [&](const std::string& text) {
    return std::string(ImportDuoAttention(text, "gates.tsv", half).status().message());
  };
  EXPECT_THAT(error("1\t2\n3\n"), HasSubstr("line 2 has 1 columns"));
  EXPECT_THAT(error("1\tx\n"), HasSubstr("line 1 column 2 is 'x'"));
  EXPECT_THAT(error("1\t\n2\t3\n"), HasSubstr("line 2 has 2 columns, the first one 1"));
  EXPECT_THAT(error("\n"), HasSubstr("no gates"));
}

TEST(HeadClassImport, RedKnotKeysAreUnderstood) {
  json map = {{"num_layers", 2},
              {"num_kv_heads", 3},
              {"kv_head_classification", {{"global", "local", "retrieval"}, {"local_full", "dense", "local"}}},
              {"kv_head_max_distance", {{-1, 256, -1}, {4096, -1, -1}}},
              {"retrieval_top_p", 0.9}};
  const auto parse = [&] { return ImportRedKnot(map.dump(), "r.json"); };
  ASSERT_TRUE(parse().ok()) << parse().status();
  EXPECT_EQ(parse()->at(0, 1), Local(256, 4));
  EXPECT_EQ(parse()->at(0, 2), kGlobal) << "retrieval heads see everything in every shipped run";
  EXPECT_EQ(parse()->at(1, 0), Local(4096, 4));
  EXPECT_EQ(parse()->at(1, 2), kGlobal) << "a local head without a distance";
  map["kv_head_sink_size"] = {{4, 8, 4}, {16, 4, 4}};
  EXPECT_EQ(parse()->at(0, 1), Local(256, 8));
  map["dense_prefix_layers"] = 1;
  EXPECT_EQ(parse()->at(0, 1), kGlobal);
  EXPECT_EQ(parse()->at(1, 0), Local(4096, 16));
  map["kv_head_classification"][1][1] = "odd";
  EXPECT_THAT(std::string(parse().status().message()),
              HasSubstr("kv_head_classification: layer 1 head 1 must not be \"odd\""));
  map.erase("kv_head_max_distance");
  EXPECT_THAT(std::string(parse().status().message()), HasSubstr("kv_head_max_distance: is missing"));
}

}  // namespace
}  // namespace spl::engine
