#include "services/engine/model/recovery_profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "services/engine/methods/recovery_methods.h"
#include "services/engine/model/model.h"
#include "services/engine/recovery/sparsex_probe.h"
#include "tests/support/engine_devices.h"
#include "tests/support/head_class_maps.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

namespace spl::engine {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

json Valid() {
  return json::parse(R"({"format": "splice-recovery-1", "num_layers": 12, "probe_layers": 9, "score_layers": 4,
                         "recompute_share": 0.2,
                         "measured": {"data": "core tasks", "answers": 300, "exact": 290, "right": 289}})");
}

std::string ErrorOf(const json& profile) {
  return std::string(RecoveryProfile::Parse(profile.dump(), "file").status().message());
}

RecoveryProfile Profile(int32_t num_layers, int32_t probe_layers, int32_t score_layers, double share) {
  RecoveryProfile profile;
  profile.num_layers = num_layers;
  profile.probe_layers = probe_layers;
  profile.score_layers = score_layers;
  profile.recompute_share = share;
  return profile;
}

TEST(RecoveryProfileTest, WhatIsWrittenIsRead) {
  const auto profile = RecoveryProfile::Parse(Valid().dump(), "file");
  ASSERT_TRUE(profile.ok()) << profile.status();
  EXPECT_EQ(profile->probe_layers, 9);
  EXPECT_EQ(profile->score_layers, 4);
  EXPECT_EQ(profile->recompute_share, 0.2);
  EXPECT_EQ(profile->right, 289);
  RecoveryProfile named = *profile;
  named.fingerprint.fill(0xab);
  const auto again = RecoveryProfile::Parse(named.ToJson(), "file");
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->ToJson(), named.ToJson());
  EXPECT_EQ(again->fingerprint, named.fingerprint);
  EXPECT_EQ(again->exact, 290);
}

TEST(RecoveryProfileTest, BadFilesAreNamed) {
  const auto with = [](const char* name, const json& value) {
    json profile = Valid();
    profile[name] = value;
    return ErrorOf(profile);
  };
  EXPECT_THAT(with("format", "x"), HasSubstr("file: format"));
  EXPECT_THAT(with("probe_layers", 13), HasSubstr("file: probe_layers"));
  EXPECT_THAT(with("probe_layers", 0), HasSubstr("file: probe_layers"));
  EXPECT_THAT(with("score_layers", 10), HasSubstr("file: score_layers"));
  for (const double share : {0.0, -0.1, 1.5}) EXPECT_THAT(with("recompute_share", share), HasSubstr("recompute_share"));
  EXPECT_THAT(with("model_fingerprint", "abc"), HasSubstr("64 hexadecimal digits"));
  EXPECT_THAT(with("measured", {{"answers", 0}}), HasSubstr("file: measured.answers"));
  EXPECT_THAT(std::string(RecoveryProfile::Parse("[", "file").status().message()), HasSubstr("file"));
  EXPECT_EQ(RecoveryProfile::Load("/nowhere/recovery.json").status().code(), absl::StatusCode::kNotFound);
}

// A request's options come before the profile, and the profile before the defaults.
TEST(RecoveryProfileTest, HoldsWhereARequestSaysNothing) {
  ModelConfig config;
  config.num_layers = 12;
  config.num_kv_heads = 2;
  config.num_qo_heads = 4;
  config.head_dim = 16;
  config.hidden_size = 64;
  config.intermediate_size = 128;
  const RecoveryProfile profile = Profile(12, 9, 4, 0.2);
  const ReuseLayout layout{10'000, 0, {{0, 9'900}}, {CopyContext::kIsolated}};
  struct Probe {
    int32_t layers, scoring;
    int64_t chosen;
    bool operator==(const Probe&) const = default;
  };
  const HeadClassMap classes = test::AllGlobal(12, 2);
  const auto probe_of = [&](const char* name, ReuseOptions options, const RecoveryProfile* of_model) {
    options.policy = name;
    const auto policy = MakeRecoveryPolicy(options, config, &classes, of_model);
    EXPECT_TRUE(policy.ok()) << policy.status();
    const PrefillStage stage = (*policy)->FirstStage(layout);
    return Probe{stage.layers.end, stage.layers.end - stage.score.layer, stage.score.k};
  };
  const auto probe = [&](const ReuseOptions& options, const RecoveryProfile* of_model) {
    const Probe sparsex = probe_of("sparsex", options, of_model);
    EXPECT_EQ(probe_of("splice", options, of_model), sparsex) << "the same rows, whatever their heads see";
    return sparsex;
  };
  EXPECT_EQ(probe({}, nullptr), (Probe{12, 6, 576})) << "the least; a twentieth would be 495";
  EXPECT_EQ(probe({}, &profile), (Probe{9, 4, 1980}));
  EXPECT_EQ(probe({.recompute_share = 0.06}, &profile), (Probe{9, 4, 594}));
  EXPECT_EQ(probe({.probe_layers = 10}, &profile), (Probe{10, 5, 1980}));
  EXPECT_EQ(probe({.score_layers = 2}, &profile), (Probe{9, 2, 1980}));
  EXPECT_EQ(probe({.score_layers = 11}, &profile), (Probe{9, 9, 1980})) << "no more than there are";
  for (const char* name : {"sparsex", "splice"}) {
    const auto dense = MakeRecoveryPolicy({.policy = name, .probe_layers = 0}, config, &classes, &profile);
    EXPECT_EQ((*dense)->FirstStage(layout).layers.end, 4) << name;
  }
}

TEST(RecoveryProfileTest, IsReadFromTheModelsFolder) {
  const spl::testing::TempDir dir;
  for (const auto& file : std::filesystem::directory_iterator(test::kTinyModel)) {
    if (file.path().filename() != "recovery.json")
      std::filesystem::create_symlink(std::filesystem::absolute(file.path()),
                                      dir.path() + "/" + file.path().filename().string());
  }
  const auto load = [&](const std::string& option) {
    return Model::Load(dir.path(), *test::DevicesOf("cpu"), {.recovery_profile = option});
  };
  const auto without = load("auto");
  ASSERT_TRUE(without.ok()) << without.status();
  EXPECT_EQ((*without)->recovery_profile(), nullptr);
  const auto write = [&](const RecoveryProfile& profile) {
    std::ofstream(dir.path() + "/recovery.json") << profile.ToJson();
  };
  RecoveryProfile profile = Profile((*without)->config().num_layers, 7, 3, 0.3);
  profile.fingerprint = (*without)->fingerprint();
  write(profile);
  const auto with = load("auto");
  ASSERT_TRUE(with.ok()) << with.status();
  ASSERT_NE((*with)->recovery_profile(), nullptr);
  EXPECT_EQ((*with)->recovery_profile()->probe_layers, 7);
  EXPECT_EQ((*load("none"))->recovery_profile(), nullptr);
  EXPECT_EQ((*load(dir.path() + "/recovery.json"))->recovery_profile()->score_layers, 3);
  EXPECT_EQ(load("/nowhere/recovery.json").status().code(), absl::StatusCode::kNotFound);
  profile.fingerprint[0] ^= 1;
  write(profile);
  EXPECT_EQ(load("auto").status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(load("auto").status().message()), HasSubstr("recovery.json"));
  write(Profile((*without)->config().num_layers + 1, 7, 3, 0.3));
  EXPECT_THAT(std::string(load("auto").status().message()), HasSubstr("layers"));
}

}  // namespace
}  // namespace spl::engine
