// Structured output of a model that writes as gpt-oss does: reasoning as it likes, then a header, then what was asked
// for. The weights are random.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "services/grammar/grammar_plugin.h"
#include "tests/cluster/local_cluster_fixture.h"
#include "tests/cluster/processes.h"
#include "tests/cluster/random_model.h"
#include "tests/support/json_schemas.h"
#include "tests/support/temp_dir.h"

namespace spl::test {
namespace {

using nlohmann::json;
using ::spl::testing::IsValid;

constexpr char kChat[] = "/v1/chat/completions";
constexpr int kEndToken = 4095;  // <|end|>, by RenameSpecialTokens

const char* const kSchemas[] = {
    R"({"type":"object","properties":{"ok":{"type":"boolean"},"note":{"type":"string","maxLength":12}},)"
    R"("required":["ok","note"],"additionalProperties":false})",
    R"({"anyOf":[{"type":"object","properties":{"name":{"type":"string","maxLength":5},"kind":{"const":"cat"}},)"
    R"("required":["name","kind"],"additionalProperties":false},{"type":"object","properties":{"name":{"type":"string",)"
    R"("maxLength":9},"lives":{"type":"integer","minimum":1,"maximum":9}},"required":["name","lives"],)"
    R"("additionalProperties":false}]})",
    R"({"enum":["<|end|>","<|start|>assistant","x"]})",
    R"({"type":"array","items":{"enum":[1,2,3]},"minItems":2,"maxItems":5})",
};

class HarmonyAnswersTest : public LocalClusterTest {
 protected:
  static void SetUpTestSuite() {
    if (!grammar::HaveGrammarPlugin()) return;
    cli::LocalClusterOptions options = RandomModelOptions(folder_.path());
    RenameSpecialTokens(folder_.path(), {"<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|start|>"});
    options.output_format.tools = "harmony";
    StartCluster(options);
  }
  void SetUp() override {
    if (!grammar::HaveGrammarPlugin()) GTEST_SKIP() << "no libsplice_xgrammar.so: its archive was not fetched";
    ASSERT_NE(cluster_, nullptr);
  }

  // The model ends a message of reasoning after some tokens: a random one would go on for thousands.
  static json Body(const char* schema, int seed) {
    return {{"messages", json::array({{{"role", "user"}, {"content", "Well?"}}})},
            {"max_tokens", 400},
            {"temperature", 1},
            {"seed", seed},
            {"logit_bias", {{std::to_string(kEndToken), 7}}},
            {"response_format",
             {{"type", "json_schema"},
              {"json_schema", {{"name", "answer"}, {"strict", true}, {"schema", json::parse(schema)}}}}}};
  }
  json Post(const char* path, const json& body) {
    const HttpReply reply = HttpPost(cluster_->http_address(), path, body.dump());
    EXPECT_EQ(reply.status, 200) << reply.body;
    return json::parse(reply.body, nullptr, false);
  }
  static void ExpectValid(const std::string& content, const char* schema) {
    const json parsed = json::parse(schema), value = json::parse(content, nullptr, false);
    EXPECT_FALSE(value.is_discarded()) << content;
    EXPECT_TRUE(IsValid(value, parsed, parsed)) << schema << "\n" << content;
  }

  static inline ::spl::testing::TempDir folder_;
};

TEST_F(HarmonyAnswersTest, TheContentIsTheJsonAloneWholeAndStreamed) {
  int ended = 0, reasoned = 0;
  for (const char* schema : kSchemas) {
    for (int seed = 0; seed < 6 && !HasFailure(); ++seed) {
      json body = Body(schema, seed);
      const json choice = Post(kChat, body).at("choices").at(0);
      const std::string content = choice["message"].value("content", ""),
                        reasoning = choice["message"].value("reasoning_content", "");
      body["stream"] = true;
      SseStream stream(cluster_->http_address(), kChat, body.dump());
      std::string streamed, streamed_reasoning;
      for (std::string event = stream.Next(); !event.empty() && event != "[DONE]"; event = stream.Next()) {
        const json data = json::parse(event);
        ASSERT_FALSE(data.contains("error")) << event;
        if (data["choices"].empty()) continue;
        streamed += data["choices"][0]["delta"].value("content", "");
        streamed_reasoning += data["choices"][0]["delta"].value("reasoning_content", "");
      }
      EXPECT_EQ(streamed, content);
      EXPECT_EQ(streamed_reasoning, reasoning);
      for (const char* tag : {"<|channel|>", "<|message|>", "<|end|>", "<|start|>"})
        EXPECT_EQ(reasoning.find(tag), std::string::npos) << reasoning;
      if (choice["finish_reason"] != "stop") continue;
      ++ended;
      reasoned += !reasoning.empty();
      ExpectValid(content, schema);
    }
  }
  std::printf("%d of 24 answers ended, %d of them behind reasoning\n", ended, reasoned);
  EXPECT_GT(ended, 12);
  EXPECT_GT(reasoned, 0);
}

TEST_F(HarmonyAnswersTest, AResponseHasItsReasoningAsAnItem) {
  json body = Body(kSchemas[0], 1);
  const json schema = body["response_format"]["json_schema"]["schema"];
  for (const char* field : {"messages", "max_tokens", "response_format"}) body.erase(field);
  body["input"] = "Well?";
  body["max_output_tokens"] = 400;
  body["text"] = {{"format", {{"type", "json_schema"}, {"name", "a"}, {"strict", true}, {"schema", schema}}}};
  int messages = 0;
  for (int seed = 0; seed < 6; ++seed) {
    body["seed"] = seed;
    const json response = Post("/v1/responses", body);
    if (response.value("status", "") != "completed") continue;
    for (const json& item : response.at("output")) {
      ASSERT_TRUE(item.at("type") == "reasoning" || item.at("type") == "message") << item;
      if (item.at("type") != "message") continue;
      ++messages;
      ExpectValid(item.at("content").at(0).at("text"), kSchemas[0]);
    }
  }
  EXPECT_GT(messages, 2);
}

// A message that the prompt begins is in the channel final already.
TEST_F(HarmonyAnswersTest, AMessageThatGoesOnHasNoHeader) {
  json body = Body(kSchemas[3], 1);
  body["messages"].push_back({{"role", "assistant"}, {"content", "The list: "}});
  body["continue_final_message"] = true;
  body["add_generation_prompt"] = false;
  ExpectValid(Post(kChat, body).at("choices").at(0).at("message").at("content"), kSchemas[3]);
}

TEST_F(HarmonyAnswersTest, WhatIsNotServedIsRefusedByItsName) {
  json body = Body(kSchemas[0], 1);
  body["response_format"]["json_schema"]["schema"] = {{"type", "array"}, {"uniqueItems", true}};
  const HttpReply reply = HttpPost(cluster_->http_address(), kChat, body.dump());
  EXPECT_EQ(reply.status, 400) << reply.body;
  EXPECT_EQ(json::parse(reply.body).at("error").at("param"), "response_format.json_schema.schema");
}

}  // namespace
}  // namespace spl::test
