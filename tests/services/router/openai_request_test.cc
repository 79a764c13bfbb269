#include "services/router/request/openai_request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "services/methods/methods.h"
#include "services/router/request/api_error.h"
#include "services/router/request/json_reader.h"
#include "services/router/request/wire.h"

namespace spl::router {
namespace {

const ChatPrompt& ChatOf(const ApiRequest& request) { return std::get<ChatPrompt>(request.generation.prompt); }

TEST(ParseChatBodyTest, FullBody) {
  const ApiRequest r = ParseChatBody(R"({
      "model":"m","messages":[{"role":"developer","content":"s"},{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}],
      "temperature":0,"top_p":0.5,"top_k":-1,"min_p":0.1,"max_tokens":5,"max_completion_tokens":7,"min_tokens":1,"n":2,"stop":["x","y"],
      "seed":-5,"logit_bias":{"12":-100},"logprobs":true,"top_logprobs":4,"stream":true,"stream_options":{"include_usage":true},
      "presence_penalty":0.5,"frequency_penalty":-0.5,"repetition_penalty":1.1,"stop_token_ids":[3],"ignore_eos":true,"user":"u",
      "metadata":{"a":"b"},"store":false,"tools":[],"tool_choice":"none","response_format":{"type":"text"},
      "splice":{"reuse":"exact","decode":"dense","namespace":"docs"}})")
                           .value();
  const Sampling& s = r.generation.sampling;
  EXPECT_EQ(r.generation.model, "m");
  ASSERT_EQ(ChatOf(r).messages.size(), 2u);
  EXPECT_EQ(ChatOf(r).messages[0].role, "developer");
  EXPECT_EQ(ChatOf(r).messages[1].content, "ab");
  EXPECT_EQ(s.temperature, 0.0F);
  EXPECT_EQ(s.top_k, 0u);
  EXPECT_EQ(s.max_tokens, 7u);
  EXPECT_EQ(s.n, 2u);
  EXPECT_EQ(s.seed, static_cast<uint64_t>(-5));
  EXPECT_EQ(s.logit_bias.at(12), -100.0F);
  EXPECT_EQ(s.logprobs, 4u);
  EXPECT_TRUE(s.HasPenalty());
  EXPECT_TRUE(r.stream.stream && r.stream.include_usage);
  EXPECT_EQ(r.generation.stop, (std::vector<std::string>{"x", "y"}));
  EXPECT_EQ(r.generation.reuse.policy(), "exact");
  EXPECT_EQ(r.generation.namespace_name, "docs");
}

TEST(ParseChatBodyTest, OptionsOfSamKv) {
  const auto r = ParseChatBody(R"({"messages":[{"role":"user","content":"a"}],"splice":{"reuse":"samkv",
      "choose":"means","recompute":"attended","budget_ratio":0.25,"fusion":true,"personal_bias":false,
      "quantized_copies":false}})");
  ASSERT_TRUE(r.ok()) << r.status();
  EXPECT_EQ(r->generation.reuse.samkv().choose(), "means");
  EXPECT_EQ(r->generation.reuse.samkv().recompute(), "attended");
  EXPECT_EQ(r->generation.reuse.samkv().budget_ratio(), 0.25);
  EXPECT_TRUE(r->generation.reuse.samkv().fusion());
  EXPECT_TRUE(r->generation.reuse.samkv().has_personal_bias() && !r->generation.reuse.samkv().personal_bias());
  EXPECT_TRUE(r->generation.reuse.samkv().has_quantized_copies() && !r->generation.reuse.samkv().quantized_copies());
}

TEST(ParseChatBodyTest, AnOptionThatIsNullIsAsIfItWereNotThere) {
  const auto parse = [](const std::string& value) {
    return ParseChatBody(R"({"messages":[{"role":"user","content":"a"}],"splice":{"score_all_heads":)" + value + "}}");
  };
  EXPECT_TRUE(parse("false")->generation.reuse.heads().has_score_all_heads());
  EXPECT_FALSE(parse("false")->generation.reuse.heads().score_all_heads());
  EXPECT_TRUE(parse("true")->generation.reuse.heads().score_all_heads());
  const auto null = parse("null");
  ASSERT_TRUE(null.ok()) << null.status();
  EXPECT_FALSE(null->generation.reuse.heads().has_score_all_heads());
  EXPECT_FALSE(parse("1").ok());
}

TEST(ParseChatBodyTest, Defaults) {
  const ApiRequest r = ParseChatBody(R"({"messages":[{"role":"user","content":""}]})").value();
  EXPECT_FALSE(r.generation.sampling.max_tokens.has_value());
  EXPECT_EQ(r.generation.sampling.temperature, 1.0F);
  EXPECT_FALSE(r.generation.sampling.seed.has_value());
  EXPECT_FALSE(r.stream.stream);
  EXPECT_TRUE(ChatOf(r).add_generation_prompt);
}

// A field that the body names overrides that field alone; null is as if it were not there.
TEST(ParseChatBodyTest, SamplingThatIsNotNamedIsTheModels) {
  const Sampling model{.temperature = 0.6F, .top_k = 20, .top_p = 0.9F, .min_p = 0.05F, .repetition_penalty = 1.05F};
  const auto chat = [&](const std::string& fields) {
    return ParseChatBody(R"({"messages":[{"role":"user","content":"a"}])" + fields + "}", model)
        .value()
        .generation.sampling;
  };
  const auto expect = [](const Sampling& got, const Sampling& want) {
    EXPECT_EQ(got.temperature, want.temperature);
    EXPECT_EQ(got.top_k, want.top_k);
    EXPECT_EQ(got.top_p, want.top_p);
    EXPECT_EQ(got.min_p, want.min_p);
    EXPECT_EQ(got.repetition_penalty, want.repetition_penalty);
  };
  expect(chat(""), model);
  expect(chat(R"(,"temperature":null)"), model);
  Sampling want = model;
  want.temperature = 0;
  expect(chat(R"(,"temperature":0)"), want);
  want = model;
  want.top_k = 0;
  expect(chat(R"(,"top_k":0)"), want);
  expect(chat(R"(,"top_k":-1)"), want);
  want = model;
  want.top_p = 1;
  want.min_p = 0;
  want.repetition_penalty = 1;
  expect(chat(R"(,"top_p":1,"min_p":0,"repetition_penalty":1)"), want);
  const Sampling completion = ParseCompletionBody(R"({"prompt":"x"})", model).value().generation.sampling;
  expect(completion, model);
  EXPECT_EQ(completion.max_tokens, 16u);
}

TEST(ParseChatBodyTest, UnknownFieldsAreListed) {
  const auto parsed = ParseChatBody(
      R"({"messages":[{"role":"user","content":"a"}],"zz":1,"null":null,"stream":true,"stream_options":{"y":1},"a":{}})");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->ignored, (std::vector<std::string>{"stream_options.y", "zz", "a"}));
  EXPECT_FALSE(ParseChatBody(R"({"messages":[{"role":"user","content":"a"}],"splice":{"zz":1}})").ok());
  EXPECT_EQ(ParamOf(ParseChatBody(R"({"messages":[{"role":"user","content":[
      {"type":"segment","text":"t","namespac":"n"}]}]})")
                        .status()),
            "messages[0].content[0].namespac");
}

// As the template gets them: in the client's order, without nulls.
TEST(ParseChatBodyTest, MembersOfMessages) {
  const auto parsed = ParseChatBody(R"({"messages":[
      {"role":"user","content":"q","zeta":{"b":1,"a":2},"name":"n","x":null},
      {"role":"assistant","content":null,"reasoning_content":"r","tool_calls":[
        {"id":"1","type":"function","function":{"name":"f","arguments":"{\"b\": 1}"}}],"refusal":null},
      {"role":"tool","tool_call_id":"1","content":[{"type":"text","text":"4"},{"type":"text","text":"2"}]},
      {"role":"assistant","refusal":"no","tool_calls":[]},
      {"role":"assistant","content":[{"type":"refusal","refusal":"never"}]}]})");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  const std::vector<tokenizer::ChatMessage>& messages = ChatOf(*parsed).messages;
  EXPECT_EQ(messages[0].extra_json, R"({"zeta":{"b":1,"a":2},"name":"n"})");
  EXPECT_FALSE(messages[1].content.has_value());
  EXPECT_EQ(messages[1].extra_json,
            R"({"reasoning_content":"r","tool_calls":[{"id":"1","type":"function","function":{"name":"f",)"
            R"("arguments":"{\"b\": 1}"}}]})");
  EXPECT_EQ(messages[2].content, "42");
  EXPECT_EQ(messages[2].extra_json, R"({"tool_call_id":"1"})");
  EXPECT_EQ(messages[3].content, "no");
  EXPECT_EQ(messages[4].content, "never");
}

TEST(ParseChatBodyTest, VariablesOfTheTemplate) {
  const auto parsed = ParseChatBody(R"({"messages":[{"role":"user","content":"a"}],"reasoning_effort":"low",
      "chat_template_kwargs":{"enable_thinking":false,"reasoning_effort":"high"},"tool_choice":"auto",
      "tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object"}}}],
      "documents":[{"title":"t","text":"x"}]})");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  const ChatPrompt& chat = ChatOf(*parsed);
  EXPECT_EQ(chat.variable_names,
            (std::vector<std::string>{"enable_thinking", "reasoning_effort", "tools", "documents"}));
  EXPECT_EQ(chat.variables_json,
            R"({"enable_thinking":false,"reasoning_effort":"low","tools":[{"type":"function","function":{"name":"f",)"
            R"("description":"d","parameters":{"type":"object"}}}],"documents":[{"title":"t","text":"x"}]})");
  EXPECT_TRUE(chat.add_generation_prompt);
  std::string many = R"({"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"v":1)";
  for (int i = 0; i < 256; ++i) many += ",\"v" + std::to_string(i) + "\":1";
  EXPECT_EQ(ParamOf(ParseChatBody(many + "}}").status()), "chat_template_kwargs");
  const auto continued =
      ParseChatBody(R"({"messages":[{"role":"assistant","content":"a"}],"continue_final_message":true,"tools":[]})");
  ASSERT_TRUE(continued.ok()) << continued.status();
  EXPECT_TRUE(ChatOf(*continued).continue_final_message);
  EXPECT_FALSE(ChatOf(*continued).add_generation_prompt);
  EXPECT_EQ(ChatOf(*continued).variables_json, "");
}

TEST(ParseCompletionBodyTest, SeveralPrompts) {
  const auto parsed = ParseCompletionBody(R"({"prompt":["a",[1,2],"c"]})");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(std::get<std::string>(parsed->generation.prompt), "a");
  ASSERT_EQ(parsed->more_prompts.size(), 2u);
  EXPECT_EQ(std::get<std::vector<TokenId>>(parsed->more_prompts[0]), (std::vector<TokenId>{1, 2}));
  EXPECT_EQ(std::get<std::string>(parsed->more_prompts[1]), "c");
}

TEST(ParseChatBodyTest, LogprobsFalseIsNone) {
  EXPECT_FALSE(ParseChatBody(R"({"messages":[{"role":"user","content":"x"}],"logprobs":false})")
                   .value()
                   .generation.sampling.logprobs.has_value());
}

TEST(ParseCompletionBodyTest, PromptForms) {
  const auto prompt_of = [](const std::string& prompt) {
    return ParseCompletionBody(R"({"prompt":)" + prompt + "}").value().generation.prompt;
  };
  EXPECT_EQ(std::get<std::string>(prompt_of("\"a\"")), "a");
  EXPECT_EQ(std::get<std::string>(prompt_of("[\"a\"]")), "a");
  EXPECT_EQ(std::get<std::vector<TokenId>>(prompt_of("[1,2]")), (std::vector<TokenId>{1, 2}));
  EXPECT_EQ(std::get<std::vector<TokenId>>(prompt_of("[[3]]")), (std::vector<TokenId>{3}));
}

TEST(ParseCompletionBodyTest, PartsOfAKnowledgeBase) {
  const auto parse = [](const std::string& part) { return ParseCompletionBody(R"({"prompt":[)" + part + "]}"); };
  const auto document = parse(R"({"type":"segment","knowledge_base":"ships","document":"faq-12"})");
  ASSERT_TRUE(document.ok()) << document.status();
  const PromptSegment& segment = std::get<SegmentedText>(document->generation.prompt).segments[0];
  EXPECT_EQ(segment.knowledge_base, "ships");
  EXPECT_EQ(segment.document, "faq-12");
  EXPECT_EQ(segment.field, "prompt[0]");
  EXPECT_TRUE(parse(R"({"type":"segment","knowledge_base":"ships","text":"t"})").ok());
  for (const auto& [part, field] : std::vector<std::pair<const char*, const char*>>{
           {R"({"type":"segment","knowledge_base":"ships"})", "prompt[0].text"},
           {R"({"type":"segment","document":"faq-12"})", "prompt[0].document"},
           {R"({"type":"segment","knowledge_base":"s","document":"d","text":"t"})", "prompt[0].document"},
           {R"({"type":"segment","knowledge_base":"s","namespace":"n","text":"t"})", "prompt[0].namespace"},
           {R"({"type":"segment","knowledge_base":3,"text":"t"})", "prompt[0].knowledge_base"},
           {R"({"type":"text","knowledge_base":"s","text":"t"})", "prompt[0].knowledge_base"}}) {
    EXPECT_EQ(ParamOf(parse(part).status()), field) << part << " " << parse(part).status();
  }
  const auto ids =
      ParseCompletionBody(R"({"prompt":[1,2,3],"splice":{"segments":[{"begin":0,"end":2,"knowledge_base":"ships"}]}})");
  ASSERT_TRUE(ids.ok()) << ids.status();
  EXPECT_EQ(std::get<TokenizedPrompt>(ids->generation.prompt).segments[0].knowledge_base, "ships");
}

// The workers' limit, before anything is reserved; other policies take more.
TEST(ParseCompletionBodyTest, SamKvTakesSoManySegments) {
  const auto parse = [](size_t count, const std::string& reuse) {
    Json ids = Json::array(), segments = Json::array(), parts = Json::array();
    for (size_t i = 0; i < count; ++i) {
      ids.push_back(7);
      segments.push_back({{"begin", i}, {"end", i + 1}});
      parts.push_back({{"type", "segment"}, {"text", "t"}});
    }
    const Json of_ids = {{"prompt", ids}, {"splice", {{"reuse", reuse}, {"segments", segments}}}};
    const Json of_text = {{"prompt", parts}, {"splice", {{"reuse", reuse}}}};
    const absl::Status status = ParseCompletionBody(of_ids.dump()).status();
    EXPECT_EQ(ParseCompletionBody(of_text.dump()).status().code(), status.code());
    return status;
  };
  const size_t kSamKvSegments = methods::FindPolicy("samkv")->max_segments;
  EXPECT_TRUE(parse(kSamKvSegments, "samkv").ok());
  EXPECT_TRUE(parse(kSamKvSegments + 1, "sparsex").ok());
  const absl::Status refused = parse(kSamKvSegments + 1, "samkv");
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ParamOf(refused), "splice.segments");
  EXPECT_EQ(refused.message(), "splice.segments: reuse samkv serves at most 1024, got 1025");
  EXPECT_EQ(HttpStatusOf(refused), 400);
}

TEST(ParseCompletionBodyTest, DefaultsToSixteenTokens) {
  EXPECT_EQ(ParseCompletionBody(R"({"prompt":"x"})").value().generation.sampling.max_tokens, 16u);
}

TEST(ParseTokenizeBodyTest, ChatBringsItsOwnBeginToken) {
  EXPECT_TRUE(ParseTokenizeBody(R"({"prompt":"x"})").value().add_special_tokens);
  EXPECT_FALSE(ParseTokenizeBody(R"({"messages":[{"role":"user","content":"x"}]})").value().add_special_tokens);
}

TEST(ErrorBodyTest, HasTheFourFields) {
  const Json body = Json::parse(ErrorBody(SetErrorCode(ParamError("n", "is {}", 5), "c"), 400));
  EXPECT_EQ(body.dump(), R"({"error":{"message":"n: is 5","type":"invalid_request_error","param":"n","code":"c"}})");
}

TEST(HttpStatusTest, Codes) {
  EXPECT_EQ(HttpStatusOf(absl::StatusCode::kInvalidArgument), 400);
  EXPECT_EQ(HttpStatusOf(absl::StatusCode::kUnauthenticated), 401);
  EXPECT_EQ(HttpStatusOf(absl::StatusCode::kNotFound), 404);
  EXPECT_EQ(HttpStatusOf(absl::StatusCode::kResourceExhausted), 429);
  EXPECT_EQ(HttpStatusOf(absl::StatusCode::kUnavailable), 503);
  EXPECT_EQ(HttpStatusOf(absl::StatusCode::kDeadlineExceeded), 504);
  EXPECT_EQ(HttpStatusOf(absl::StatusCode::kInternal), 500);
  EXPECT_EQ(HttpStatusOf(absl::StatusCode::kAborted), 409);
  EXPECT_EQ(HttpStatusOf(absl::FailedPreconditionError("the cluster's state")), 503);
  EXPECT_EQ(HttpStatusOf(SetErrorCode(absl::FailedPreconditionError("the thing's state"), "c")), 409);
}

TEST(StructuredOutputFieldsTest, EveryFieldIsReadAndTravels) {
  using grammar::GrammarKind;
  struct Case {
    const char* fields;
    grammar::GrammarSpec spec;
    const char* field;
  };
  const Case cases[] = {
      {R"("response_format":{"type":"json_object"})", {GrammarKind::kJsonObject, "", false}, "response_format"},
      {R"("response_format":{"type":"json_schema","json_schema":{"name":"a","strict":true,"schema":{"b":1,"a":2}}})",
       {GrammarKind::kJsonSchema, R"({"b":1,"a":2})", true},
       "response_format.json_schema.schema"},
      {R"("response_format":{"type":"json_schema","json_schema":{"name":"a","schema":true}})",
       {GrammarKind::kJsonSchema, "true", false},
       "response_format.json_schema.schema"},
      {R"("guided_json":"{\"type\": \"null\"}")",
       {GrammarKind::kJsonSchema, "{\"type\": \"null\"}", false},
       "guided_json"},
      {R"("structured_outputs":{"regex":"a+","json":null})",
       {GrammarKind::kRegex, "a+", false},
       "structured_outputs.regex"},
      {R"("guided_choice":["a","\u00fc"])", {GrammarKind::kChoice, "[\"a\",\"ü\"]", false}, "guided_choice"},
      {R"("guided_grammar":"root ::= x")", {GrammarKind::kGrammar, "root ::= x", false}, "guided_grammar"},
      {R"("structured_outputs":{"structural_tag":"{}"})",
       {GrammarKind::kStructuralTag, "{}", false},
       "structured_outputs.structural_tag"},
  };
  for (const Case& c : cases) {
    const auto request = ParseChatBody(std::string(R"({"messages":[{"role":"user","content":"x"}],)") + c.fields + "}");
    ASSERT_TRUE(request.ok()) << request.status();
    const Sampling& sampling = request->generation.sampling;
    EXPECT_EQ(sampling.structured_output, c.spec) << c.fields;
    EXPECT_EQ(sampling.structured_field, c.field);
    EXPECT_EQ(FromProto(ToProto(sampling)).structured_output, c.spec) << c.fields;
  }
  for (const char* none :
       {R"("response_format":{"type":"text"})", R"("guided_json":null)", R"("structured_outputs":{})"}) {
    const auto request = ParseChatBody(std::string(R"({"messages":[{"role":"user","content":"x"}],)") + none + "}");
    ASSERT_TRUE(request.ok()) << request.status();
    EXPECT_FALSE(request->generation.sampling.structured_output.has_value()) << none;
    EXPECT_FALSE(ToProto(request->generation.sampling).has_structured_output());
  }
}

TEST(ForcedCallsTest, BecomeAGrammarOfTheModelsFormat) {
  const auto parse = [](const std::string& more) {
    return ParseChatBody(R"({"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":)"
                         R"({"name":"f","parameters":{"type":"object"}}}],)" +
                         more + "}");
  };
  auto named = parse(R"("tool_choice":{"type":"function","function":{"name":"f"}})");
  ASSERT_TRUE(named.ok()) << named.status();
  ASSERT_TRUE(named->forced_calls.has_value());
  EXPECT_TRUE(named->forced_calls->one);
  ASSERT_TRUE(ForceCalls({.tools = "hermes"}, nullptr, *named).ok());
  const auto& spec = named->generation.sampling.structured_output;
  ASSERT_TRUE(spec.has_value());
  EXPECT_EQ(spec->kind, grammar::GrammarKind::kStructuralTag);
  EXPECT_NE(spec->text.find(R"(\n{\"name\": \"f\", \"arguments\": )"), std::string::npos) << spec->text;
  EXPECT_NE(spec->text.find(R"("stop_after_first":true)"), std::string::npos);
  auto required = parse(R"("tool_choice":"required")");
  ASSERT_TRUE(required.ok()) << required.status();
  EXPECT_FALSE(required->forced_calls->one);
  EXPECT_TRUE(parse(R"("tool_choice":"required","parallel_tool_calls":false)")->forced_calls->one);
  auto generic = parse(R"("tool_choice":"required")");
  ASSERT_TRUE(ForceCalls({.tools = "json"}, nullptr, *generic).ok());
  EXPECT_NE(generic->generation.sampling.structured_output->text.find(R"("{\"name\": \"f\", \"arguments\": ")"),
            std::string::npos);
  const absl::Status none = ForceCalls({.tools = "none"}, nullptr, *required);
  EXPECT_EQ(none.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(none.message().find("--tool-parser"), std::string::npos) << none;
  EXPECT_FALSE(parse(R"("tool_choice":"auto")")->forced_calls.has_value());
}

}  // namespace
}  // namespace spl::router
