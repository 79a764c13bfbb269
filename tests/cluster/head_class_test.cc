// Requests with head classes through the real programs: the answers of a generator in one process, from less KV.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "kernels/backend/backend.h"
#include "services/engine/engine.h"
#include "services/engine/model/head_classes.h"
#include "services/tokenizer/decoder.h"
#include "services/tokenizer/prompt.h"
#include "services/tokenizer/tokenizer.h"
#include "tests/cluster/processes.h"
#include "tests/support/eventually.h"
#include "tests/support/paths.h"

namespace spl::test {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;

class HeadClassClusterTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    map_file_ = testing::TempDir() + "/head_classes_cluster_" + std::to_string(::getpid()) + ".json";
    std::ofstream(map_file_) << engine::HeadClassMap::Spread(12, 4, *engine::FindHeadPreset("paper")).ToJson();
    engine::ModelOptions options;
    options.head_classes = map_file_;
    auto model = engine::Model::Load(kTinyModel, kernels::MakeCpuBackend(), options);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *model;
    auto tokenizer = tokenizer::Tokenizer::Load(kTinyModel);
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    tokenizer_ = *std::move(tokenizer);
  }
  static void TearDownTestSuite() {
    model_.reset();
    ::unlink(map_file_.c_str());
  }

  // Different from their first words on: a prompt that begins like another one would find its KV.
  static std::string Prompt(int number) {
    std::string prompt = "Log " + std::to_string(number * 7919) + ". ";
    for (int i = 0; i < 30 + 25 * number; ++i)
      prompt += "Ship " + std::to_string(i * number + 3) + " left harbour " + std::to_string(i % (number + 2)) + ". ";
    return prompt;
  }
  static std::string Expected(const std::string& prompt, const engine::ReuseOptions& reuse) {
    engine::LocalGeneratorOptions options{.max_tokens = 4096};
    options.reuse_options = reuse;
    auto generator = engine::LocalGenerator::Create(model_, options);
    EXPECT_TRUE(generator.ok()) << generator.status();
    const auto ids = tokenizer::EncodePrompt(*tokenizer_, prompt, true);
    engine::SamplingParams sampling;
    sampling.temperature = 0;
    sampling.max_tokens = kTokens;
    sampling.ignore_eos = true;
    tokenizer::StreamDecoder decoder(*tokenizer_, {.skip_special_tokens = true});
    std::string text;
    const absl::Status status = (*generator)->Generate(*ids, sampling, [&](int32_t, const engine::SampledToken& token) {
      text += *decoder.Append(token.token);
      return true;
    });
    EXPECT_TRUE(status.ok()) << status;
    return text + decoder.Finish();
  }
  static json Ask(const std::string& http, const std::string& prompt, const json& splice) {
    const json body = {{"model", "splice-tiny"}, {"prompt", prompt},   {"max_tokens", kTokens},
                       {"temperature", 0},       {"ignore_eos", true}, {"splice", splice}};
    const HttpReply reply = HttpPost(http, "/v1/completions", body.dump());
    EXPECT_EQ(reply.status, 200) << reply.body;
    return json::parse(reply.body, nullptr, false);
  }

  static constexpr int kTokens = 40;
  static inline std::string map_file_;
  static inline std::shared_ptr<const engine::Model> model_;
  static inline std::unique_ptr<tokenizer::Tokenizer> tokenizer_;
};

TEST_F(HeadClassClusterTest, FourProcessesEqualOneOverBothCarriers) {
  for (const char* transport : {"shm", "tcp"}) {
    auto cluster = ProcessCluster::Start({.model_dir = kTinyModel,
                                          .transport = transport,
                                          .prefill_flags = {"--head-classes", map_file_},
                                          .decode_flags = {"--head-classes", map_file_}});
    ASSERT_NE(cluster, nullptr);
    ASSERT_TRUE(cluster->WaitReady());
    for (int number = 1; number <= 4; ++number) {
      const std::string prompt = Prompt(number);
      for (const bool restored : {false, true}) {
        engine::ReuseOptions reuse{.policy = "redknot"};
        reuse.restore_share = restored ? 0.1 : 0;
        reuse.restore_threshold = 0;
        const json answer = Ask(cluster->http(), prompt,
                                {{"reuse", "redknot"},
                                 {"publish", false},
                                 {"restore_share", reuse.restore_share},
                                 {"restore_threshold", 0}});
        ASSERT_TRUE(answer.contains("choices")) << answer;
        EXPECT_EQ(answer["choices"][0]["text"].get<std::string>(), Expected(prompt, reuse)) << transport << number;
        EXPECT_EQ(answer["splice"]["decode"], "head_classes");
        const int64_t length = answer["usage"]["prompt_tokens"];
        const int64_t dense = engine::PagesForTokens(model_->config(), length);
        int64_t kept = 0;
        for (const int64_t pages :
             engine::PagesByRank({12, 4}, engine::ServedClasses(*model_->head_classes()).get(), 1, length))
          kept += pages;
        const int64_t heads = restored ? answer["splice"]["head_classes"]["restored_heads"].get<int64_t>() : 0;
        EXPECT_EQ(heads > 0, restored);
        const int64_t hole = engine::HoleOf({false, 256, 4}, length).size();
        // Of a short prompt everything is sent where the measured cost of a write says so.
        const auto bytes = [&](int64_t pages) { return pages * static_cast<int64_t>(model_->page_bytes()); };
        const auto moved = answer["splice"]["bytes"]["moved"].get<int64_t>();
        EXPECT_TRUE(moved == bytes(kept + heads * hole) || (number < 4 && moved == bytes(dense)))
            << moved << " of " << length << " tokens, kept " << bytes(kept) << ", dense " << bytes(dense);
        if (number == 4) {
          EXPECT_LT(kept, dense * 2 / 3) << length;
        }
      }
      // The same text, computed exactly, needs all of it.
      const json exact = Ask(cluster->http(), prompt, {{"reuse", "exact"}, {"publish", false}});
      EXPECT_EQ(exact["choices"][0]["text"].get<std::string>(), Expected(prompt, {.policy = "exact"}));
      EXPECT_EQ(exact["splice"]["decode"], "dense");
    }
    // Nothing is left behind.
    EXPECT_TRUE(Eventually([&] {
      const std::string metrics = HttpGet(cluster->decode[0]->ready("metrics"), "/metrics").body;
      return MetricValue(metrics, "splice_kv_pages_used") == 0;
    }));
  }
}

}  // namespace
}  // namespace spl::test
