// Sampling parameters from a model's generation_config.json.
#include "services/router/request/sampling_defaults.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "services/router/request/wire.h"
#include "tests/support/temp_dir.h"

namespace spl::router {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class SamplingDefaultsTest : public ::testing::Test {
 protected:
  absl::StatusOr<Sampling> Load(const std::string& text) {
    std::ofstream(dir_.path() + "/generation_config.json") << text;
    return LoadSamplingDefaults(dir_.path());
  }
  testing::TempDir dir_;
};

TEST_F(SamplingDefaultsTest, TakesTheFiveParameters) {
  const auto all = Load(R"({"bos_token_id": 1, "do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
                            "min_p": 0.01, "repetition_penalty": 1.05, "max_new_tokens": 7,
                            "transformers_version": "4.51.0"})");
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(all->temperature, 0.6F);
  EXPECT_EQ(all->top_k, 20u);
  EXPECT_EQ(all->top_p, 0.95F);
  EXPECT_EQ(all->min_p, 0.01F);
  EXPECT_EQ(all->repetition_penalty, 1.05F);
  EXPECT_FALSE(all->max_tokens.has_value());
}

TEST_F(SamplingDefaultsTest, WhatIsNotThereKeepsTheApisDefault) {
  const Sampling api;
  for (const char* text : {"{}", R"({"temperature": null, "top_k": null})", R"({"top_k": -1, "do_sample": true})"}) {
    const auto none = Load(text);
    ASSERT_TRUE(none.ok()) << text << ": " << none.status();
    EXPECT_EQ(none->temperature, api.temperature) << text;
    EXPECT_EQ(none->top_k, api.top_k) << text;
    EXPECT_EQ(none->top_p, api.top_p) << text;
  }
  EXPECT_EQ(LoadSamplingDefaults(dir_.path() + "/nowhere")->temperature, api.temperature);
}

TEST_F(SamplingDefaultsTest, NotToSampleIsGreedy) {
  const auto greedy = Load(R"({"do_sample": false, "temperature": 0.7, "repetition_penalty": 1.1})");
  ASSERT_TRUE(greedy.ok()) << greedy.status();
  EXPECT_EQ(greedy->temperature, 0);
  EXPECT_EQ(greedy->repetition_penalty, 1.1F);
  EXPECT_EQ(LoadSamplingDefaults("models/splice-tiny")->temperature, 0) << "the bundled model is greedy";
}

TEST_F(SamplingDefaultsTest, AValueThatNoRequestMayHaveNamesFileAndMember) {
  for (const auto& [text, member] :
       std::vector<std::pair<std::string, std::string>>{{R"({"temperature": 5})", "temperature"},
                                                        {R"({"top_p": "high"})", "top_p"},
                                                        {R"({"top_k": 1.5})", "top_k"},
                                                        {R"({"do_sample": 1})", "do_sample"},
                                                        {"[1]", "JSON object"},
                                                        {"{", "JSON"}}) {
    const auto bad = Load(text);
    EXPECT_EQ(bad.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(bad.status().message()),
                AllOf(HasSubstr("generation_config.json"), HasSubstr(member), HasSubstr("--generation-config none")))
        << text;
  }
}

// Over gRPC an unset field is the model's, and 0 is 0.
TEST(SamplingFromProtoTest, UnsetIsTheModelsAndZeroIsZero) {
  const Sampling model{.temperature = 0.6F, .top_k = 20, .top_p = 0.9F, .min_p = 0.05F, .repetition_penalty = 1.05F};
  v1::SamplingParams params;
  EXPECT_EQ(FromProto(params, model).temperature, 0.6F);
  EXPECT_EQ(FromProto(params, model).top_k, 20u);
  EXPECT_EQ(FromProto(params, model).min_p, 0.05F);
  params.set_top_k(0);
  params.set_min_p(0);
  EXPECT_EQ(FromProto(params, model).top_k, 0u);
  EXPECT_EQ(FromProto(params, model).min_p, 0);
  EXPECT_EQ(FromProto(params, model).top_p, 0.9F);
  EXPECT_EQ(FromProto(v1::SamplingParams()).temperature, 1.0F);
  // On the way to the workers nothing is left open.
  EXPECT_TRUE(ToProto(Sampling()).has_top_k());
  EXPECT_TRUE(ToProto(Sampling()).has_min_p());
}

}  // namespace
}  // namespace spl::router
