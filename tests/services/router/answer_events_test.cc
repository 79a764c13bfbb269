// Answers of /v1/messages and /v1/responses, whole and as events, cut at every place.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "services/router/request/messages_response.h"
#include "services/router/request/responses_response.h"

namespace spl::router {
namespace {

using nlohmann::json;
using ::testing::StartsWith;

const tokenizer::Tokenizer& Tokenizer() {
  static const auto* const tokenizer = tokenizer::Tokenizer::Load("models/splice-tiny").value().release();
  return *tokenizer;
}

const AnswerFormat kFormat = {
    .format = {.tools = "hermes", .reasoning = "think"},
    .tools_json = R"([{"type": "function", "function": {"name": "f"}}])",
};

constexpr char kCall[] = R"(<tool_call>{"name": "f", "arguments": {"b": 1, "a": ["x"]}}</tool_call>)";

const std::vector<std::string> kTexts = {
    "",
    "Just text.",
    "<think>\nHm, ümläut.\n</think>\n\nSo.",
    "<think>only thoughts",
    std::string("<think>a</think>Look: ") + kCall,
    kCall + std::string("\n") + kCall,
    std::string("Before ") + kCall + " between " + kCall + " behind",
    "<tool_call>no call</tool_call>",
};

FinalInfo Final() {
  FinalInfo final{.prompt_tokens = 100, .completion_tokens = 7};
  final.receipt.set_cached_tokens(64);
  return final;
}

struct Ending {
  FinishReason reason = FinishReason::kStop;
  std::string stop_string = {};
};

// The deltas of an answer in these pieces; its end is a delta of its own.
std::vector<Delta> DeltasOf(const std::vector<std::string>& pieces, const Ending& ending) {
  std::vector<Delta> deltas;
  for (const std::string& piece : pieces) deltas.push_back({.text = piece});
  deltas.push_back({.finish_reason = ending.reason, .stop_string = ending.stop_string});
  return deltas;
}

// The text in one piece, in characters, and in two pieces of every size. Deltas have whole characters.
std::vector<std::vector<std::string>> CutsOf(const std::string& text) {
  std::vector<std::vector<std::string>> cuts = {{text}, {}};
  for (size_t at = 0; at < text.size(); ++at) {
    if ((text[at] & 0xC0) == 0x80) {
      cuts[1].back() += text[at];
      continue;
    }
    cuts[1].emplace_back(1, text[at]);
    if (at > 0) cuts.push_back({text.substr(0, at), text.substr(at)});
  }
  return cuts;
}

// The events of a stream; each has the name of its type.
std::vector<json> Events(AnswerFormatter& formatter, const std::vector<Delta>& deltas) {
  formatter.SetPrompt(100, {});
  std::string text;
  for (size_t i = 0; i < deltas.size(); ++i) {
    const FinalInfo final = Final();
    const bool last = i + 1 == deltas.size();
    text += formatter.Events(std::span(&deltas[i], 1), last ? &final : nullptr);
  }
  std::vector<json> events;
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find("\n\n", at);
    const size_t line = text.find('\n', at);
    EXPECT_EQ(text.substr(at, 7), "event: ");
    EXPECT_EQ(text.substr(line + 1, 6), "data: ");
    events.push_back(json::parse(text.substr(line + 7, end - line - 7)));
    EXPECT_EQ(events.back().at("type"), text.substr(at + 7, line - at - 7));
    at = end + 2;
  }
  return events;
}

json Whole(AnswerFormatter& formatter, const std::vector<Delta>& deltas) {
  formatter.SetPrompt(100, {});
  formatter.Add(deltas);
  return json::parse(Dump(formatter.Whole(Final())));
}

// Ids of calls are drawn anew for each answer.
void DropCallIds(json* list, const char* name, const char* prefix) {
  for (json& item : *list) {
    if (!item.contains(name) || item.at("type") == "message" || item.at("type") == "reasoning") continue;
    EXPECT_THAT(item.at(name).get<std::string>(), StartsWith(prefix));
    item.erase(name);
  }
}

// The message that the events of a stream make; checks their order.
json PutTogetherMessage(const std::vector<json>& events) {
  EXPECT_GE(events.size(), 4u);
  EXPECT_EQ(events[0].at("type"), "message_start");
  EXPECT_EQ(events[1], json({{"type", "ping"}}));
  json message = events[0].at("message");
  EXPECT_EQ(message.at("content"), json::array());
  EXPECT_EQ(message.at("usage").at("input_tokens"), 100);
  std::string arguments;
  bool open = false;
  for (size_t i = 2; i < events.size(); ++i) {
    const json& event = events[i];
    const std::string type = event.at("type");
    if (event.contains("index")) {
      EXPECT_EQ(event.at("index"), message["content"].size() - (type == "content_block_start" ? 0 : 1));
    }
    if (type == "content_block_start") {
      EXPECT_FALSE(std::exchange(open, true));
      message["content"].push_back(event.at("content_block"));
      arguments.clear();
    } else if (type == "content_block_delta") {
      EXPECT_TRUE(open);
      json& block = message["content"].back();
      const json& delta = event.at("delta");
      const std::string kind = delta.at("type");
      if (kind == "text_delta")
        block["text"] = block.at("text").get<std::string>() + delta.at("text").get<std::string>();
      if (kind == "thinking_delta")
        block["thinking"] = block.at("thinking").get<std::string>() + delta.at("thinking").get<std::string>();
      if (kind == "signature_delta") {
        EXPECT_EQ(delta.at("signature"), block.at("signature"));
      }
      if (kind == "input_json_delta") arguments += delta.at("partial_json").get<std::string>();
    } else if (type == "content_block_stop") {
      EXPECT_TRUE(std::exchange(open, false));
      if (!arguments.empty()) message["content"].back()["input"] = json::parse(arguments);
    } else if (type == "message_delta") {
      EXPECT_EQ(i + 2, events.size());
      message.update(event.at("delta"));
      message["usage"] = event.at("usage");
      message["splice"] = event.at("splice");
    } else {
      EXPECT_EQ(type, "message_stop");
    }
  }
  EXPECT_FALSE(open);
  EXPECT_EQ(events.back().at("type"), "message_stop");
  return message;
}

MessagesFormatter Messages(AnswerFormat format = kFormat) {
  format.call_id = "toolu_";
  return {Tokenizer(), {.id = "msg_1", .model = "m", .request_id = "r", .answer_format = std::move(format)}};
}

TEST(MessagesFormatterTest, EventsMakeTheWholeMessageAtEveryCut) {
  for (const std::string& text : kTexts) {
    SCOPED_TRACE(text);
    MessagesFormatter first = Messages();
    json whole = Whole(first, DeltasOf({text}, {}));
    DropCallIds(&whole["content"], "id", "toolu_");
    for (const auto& pieces : CutsOf(text)) {
      MessagesFormatter formatter = Messages();
      json streamed = PutTogetherMessage(Events(formatter, DeltasOf(pieces, {})));
      DropCallIds(&streamed["content"], "id", "toolu_");
      ASSERT_EQ(streamed, whole) << pieces.size() << " pieces";
    }
  }
}

TEST(MessagesFormatterTest, Blocks) {
  MessagesFormatter formatter = Messages();
  const json message =
      Whole(formatter, DeltasOf({"<think>Hm.</think>A " + std::string(kCall) + " B"}, {FinishReason::kStop}));
  EXPECT_EQ(message.at("type"), "message");
  EXPECT_EQ(message.at("role"), "assistant");
  ASSERT_EQ(message.at("content").size(), 4u);
  EXPECT_EQ(message["content"][0], json({{"type", "thinking"}, {"thinking", "Hm."}, {"signature", ""}}));
  EXPECT_EQ(message["content"][1], json({{"type", "text"}, {"text", "A"}}));
  EXPECT_EQ(message["content"][2].at("type"), "tool_use");
  EXPECT_EQ(message["content"][2].at("name"), "f");
  EXPECT_EQ(message["content"][2].at("input"), json({{"b", 1}, {"a", {"x"}}}));
  EXPECT_EQ(message["content"][3], json({{"type", "text"}, {"text", "B"}}));
  EXPECT_EQ(message.at("stop_reason"), "tool_use");
  // Cached tokens are counted beside the others.
  EXPECT_EQ(message.at("usage"), json({{"input_tokens", 36},
                                       {"cache_creation_input_tokens", 0},
                                       {"cache_read_input_tokens", 64},
                                       {"output_tokens", 7}}));
  EXPECT_TRUE(message.contains("splice"));
}

TEST(MessagesFormatterTest, WhyAnAnswerEnds) {
  const struct {
    std::string text;
    Ending ending;
    std::string reason;
    json stop_sequence;
  } cases[] = {
      {"Text.", {FinishReason::kStop}, "end_turn", nullptr},
      {"Text.", {FinishReason::kLength}, "max_tokens", nullptr},
      {"Text.", {FinishReason::kStop, "END"}, "stop_sequence", "END"},
      {kCall, {FinishReason::kStop}, "tool_use", nullptr},
      {kCall, {FinishReason::kLength}, "max_tokens", nullptr},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.reason);
    MessagesFormatter formatter = Messages(), streaming = Messages();
    const json whole = Whole(formatter, DeltasOf({c.text}, c.ending));
    EXPECT_EQ(whole.at("stop_reason"), c.reason);
    EXPECT_EQ(whole.at("stop_sequence"), c.stop_sequence);
    const json streamed = PutTogetherMessage(Events(streaming, DeltasOf({c.text}, c.ending)));
    EXPECT_EQ(streamed.at("stop_reason"), c.reason);
    EXPECT_EQ(streamed.at("stop_sequence"), c.stop_sequence);
  }
}

// Arguments that are nested too deeply to be written as JSON are a text; nothing ends the program.
TEST(MessagesFormatterTest, ArgumentsOfAnyDepth) {
  const auto call = [](size_t depth) {
    return R"(<tool_call>{"name": "f", "arguments": {"a": )" + std::string(depth, '[') + R"("]\"[")" +
           std::string(depth, ']') + "}}</tool_call>";
  };
  MessagesFormatter shallow = Messages(), deep = Messages();
  EXPECT_TRUE(Whole(shallow, DeltasOf({call(200)}, {})).at("content").at(0).at("input").contains("a"));
  const json input = Whole(deep, DeltasOf({call(100'000)}, {})).at("content").at(0).at("input");
  EXPECT_THAT(input.at("arguments").get<std::string>(), StartsWith(R"({"a": [[[)"));
}

TEST(MessagesFormatterTest, AFailedStreamEndsWithAnError) {
  MessagesFormatter formatter = Messages();
  const Delta delta{.text = "Hi"};
  formatter.Events(std::span(&delta, 1), nullptr);
  const std::string event = formatter.ErrorEvents(absl::UnavailableError("gone"));
  ASSERT_THAT(event, StartsWith("event: error\ndata: {"));
  EXPECT_EQ(
      json::parse(event.substr(event.find('{'))),
      json({{"type", "error"}, {"error", {{"type", "overloaded_error"}, {"message", "gone"}}}, {"request_id", "r"}}));
}

// The response that the events of a stream make; checks their order.
json PutTogetherResponse(const std::vector<json>& events) {
  json output = json::array();
  std::string open, text;
  for (size_t i = 0; i < events.size(); ++i) {
    const json& event = events[i];
    const std::string type = event.at("type");
    EXPECT_EQ(event.at("sequence_number"), i);
    if (event.contains("output_index")) {
      EXPECT_EQ(event.at("output_index"), output.size() - (type == "response.output_item.added" ? 0 : 1));
    }
    if (event.contains("item_id")) {
      EXPECT_EQ(event.at("item_id"), open);
    }
    if (type == "response.output_item.added") {
      EXPECT_EQ(open, "");
      output.push_back(event.at("item"));
      EXPECT_EQ(output.back().at("status"), "in_progress");
      open = output.back().at("id");
      text.clear();
    } else if (type == "response.content_part.added") {
      EXPECT_EQ(event.at("part").at("text"), "");
    } else if (type.ends_with(".delta")) {
      text += event.at("delta").get<std::string>();
    } else if (type == "response.function_call_arguments.done") {
      EXPECT_EQ(event.at("arguments"), text);
    } else if (type == "response.output_text.done" || type == "response.reasoning_text.done") {
      EXPECT_EQ(event.at("text"), text);
    } else if (type == "response.content_part.done") {
      EXPECT_EQ(event.at("part").at("text"), text);
    } else if (type == "response.output_item.done") {
      EXPECT_EQ(event.at("item").at("id"), open);
      output.back() = event.at("item");
      open.clear();
    } else if (i < 2) {
      EXPECT_EQ(type, i == 0 ? "response.created" : "response.in_progress");
      EXPECT_EQ(event.at("response").at("status"), "in_progress");
      EXPECT_EQ(event.at("response").at("output"), json::array());
    } else {
      EXPECT_EQ(i + 1, events.size()) << type;
    }
  }
  EXPECT_EQ(open, "");
  const json& response = events.back().at("response");
  EXPECT_EQ(events.back().at("type"), "response." + response.at("status").get<std::string>());
  EXPECT_EQ(response.at("output"), output);
  return response;
}

ResponsesFormatter Responses(std::function<void(const OrderedJson&)> on_done = nullptr) {
  return {Tokenizer(),
          {.id = std::string(32, '5'),
           .created = 1,
           .model = "m",
           .echo = {{"metadata", {{"a", "b"}}}, {"store", true}},
           .answer_format = kFormat,
           .on_done = std::move(on_done)}};
}

TEST(ResponsesFormatterTest, EventsMakeTheWholeResponseAtEveryCut) {
  for (const std::string& text : kTexts) {
    SCOPED_TRACE(text);
    ResponsesFormatter first = Responses();
    json whole = Whole(first, DeltasOf({text}, {}));
    DropCallIds(&whole["output"], "call_id", "call_");
    for (const auto& pieces : CutsOf(text)) {
      ResponsesFormatter formatter = Responses();
      json streamed = PutTogetherResponse(Events(formatter, DeltasOf(pieces, {})));
      DropCallIds(&streamed["output"], "call_id", "call_");
      ASSERT_EQ(streamed, whole) << pieces.size() << " pieces";
    }
  }
}

TEST(ResponsesFormatterTest, Items) {
  json kept;
  ResponsesFormatter formatter = Responses([&](const OrderedJson& done) { kept = json::parse(Dump(done)); });
  const json response = Whole(formatter, DeltasOf({"<think>Hm.</think>A " + std::string(kCall) + " B"}, {}));
  EXPECT_EQ(kept, response);
  const std::string id(32, '5');
  EXPECT_EQ(response.at("id"), "resp_" + id);
  EXPECT_EQ(response.at("object"), "response");
  EXPECT_EQ(response.at("status"), "completed");
  EXPECT_EQ(response.at("error"), nullptr);
  EXPECT_EQ(response.at("metadata"), json({{"a", "b"}}));
  ASSERT_EQ(response.at("output").size(), 4u);
  json output = response.at("output");
  EXPECT_EQ(output[0], json({{"id", "rs_" + id + "_0"},
                             {"type", "reasoning"},
                             {"summary", json::array()},
                             {"content", {{{"type", "reasoning_text"}, {"text", "Hm."}}}},
                             {"status", "completed"}}));
  EXPECT_EQ(
      output[1].at("content"),
      json::array(
          {{{"type", "output_text"}, {"text", "A"}, {"annotations", json::array()}, {"logprobs", json::array()}}}));
  EXPECT_EQ(output[1].at("role"), "assistant");
  EXPECT_EQ(output[2].at("type"), "function_call");
  EXPECT_EQ(output[2].at("name"), "f");
  EXPECT_EQ(output[2].at("arguments"), R"({"b": 1, "a": ["x"]})");
  EXPECT_EQ(output[3].at("id"), "msg_" + id + "_3");
  EXPECT_EQ(ResponseOfItem("msg_" + id + "_3"), "resp_" + id);
  EXPECT_EQ(ResponseOfItem("msg_1"), "");
  const json& usage = response.at("usage");
  EXPECT_EQ(usage.at("input_tokens"), 100);
  EXPECT_EQ(usage.at("input_tokens_details").at("cached_tokens"), 64);
  EXPECT_EQ(usage.at("output_tokens"), 7);
  EXPECT_EQ(usage.at("total_tokens"), 107);
  const size_t reasoning = Tokenizer().Encode("Hm.", {}).value().size();
  EXPECT_EQ(usage.at("output_tokens_details").at("reasoning_tokens"), reasoning);
}

TEST(ResponsesFormatterTest, AnAnswerWithoutTextIsAnEmptyMessage) {
  ResponsesFormatter formatter = Responses();
  const json output = Whole(formatter, DeltasOf({}, {})).at("output");
  ASSERT_EQ(output.size(), 1u);
  EXPECT_EQ(output[0].at("content").at(0).at("text"), "");
}

TEST(ResponsesFormatterTest, AnAnswerThatWasCutOffIsIncomplete) {
  for (const char* text : {"Text.", "<think>Hm", kCall}) {
    ResponsesFormatter formatter = Responses(), streaming = Responses();
    const json whole = Whole(formatter, DeltasOf({text}, {FinishReason::kLength}));
    EXPECT_EQ(whole.at("status"), "incomplete");
    EXPECT_EQ(whole.at("incomplete_details"), json({{"reason", "max_output_tokens"}}));
    EXPECT_EQ(whole.at("output").back().at("status"), "incomplete");
    EXPECT_EQ(PutTogetherResponse(Events(streaming, DeltasOf({text}, {FinishReason::kLength}))).at("status"),
              "incomplete");
  }
}

TEST(ResponsesFormatterTest, AFailedStreamEndsWithTheError) {
  ResponsesFormatter formatter = Responses();
  const Delta delta{.text = "Hi"};
  formatter.Events(std::span(&delta, 1), nullptr);
  const std::string event = formatter.ErrorEvents(absl::UnavailableError("gone"));
  ASSERT_THAT(event, StartsWith("event: response.failed\ndata: {"));
  const json failed = json::parse(event.substr(event.find('{')));
  EXPECT_EQ(failed.at("response").at("status"), "failed");
  EXPECT_EQ(failed.at("response").at("error"), json({{"code", "server_error"}, {"message", "gone"}}));
  EXPECT_GT(failed.at("sequence_number"), 2);
}

}  // namespace
}  // namespace spl::router
