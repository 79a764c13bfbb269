#include "services/router/request/responses_request.h"

#include <utility>

#include "services/router/request/api_error.h"
#include "services/router/request/response_items.h"

namespace spl::router {
namespace {

class Translator {
 public:
  Translator(const Json& body, const EarlierResponses& earlier) : reader_(body, ""), earlier_(earlier) {}

  absl::StatusOr<ResponsesRequest> Run() {
    chat()["messages"] = Json::array();
    names().Add("messages", "input");
    SPLICE_RETURN_IF_ERROR(ReadInstructions());
    SPLICE_RETURN_IF_ERROR(ReadConversation());
    SPLICE_RETURN_IF_ERROR(ReadTools());
    SPLICE_RETURN_IF_ERROR(ReadToolChoice());
    SPLICE_RETURN_IF_ERROR(ReadText());
    SPLICE_RETURN_IF_ERROR(ReadReasoning());
    CopySharedMembers(reader_, &chat());
    if (const Json* const stop = reader_.Raw("stop")) chat()["stop"] = *stop;
    if (const Json* const limit = reader_.Raw("max_output_tokens")) chat()["max_tokens"] = *limit;
    names().Add("max_tokens", "max_output_tokens");
    SPLICE_RETURN_IF_ERROR(ReadRest());
    SPLICE_RETURN_IF_ERROR(reader_.FinishIgnoring(&out_.translated.ignored));
    return std::move(out_);
  }

 private:
  Json& chat() { return out_.translated.chat; }
  FieldNames& names() { return out_.translated.names; }
  void Ignored(const char* name) { out_.translated.ignored.emplace_back(name); }
  void Echo(const char* name, Json fallback) {
    const Json* const value = reader_.Raw(name);
    out_.echo[name] = value == nullptr ? std::move(fallback) : *value;
  }

  absl::Status ReadInstructions() {
    std::string instructions;
    reader_.String("instructions", &instructions);
    SPLICE_RETURN_IF_ERROR(reader_.status());
    Echo("instructions", nullptr);
    if (instructions.empty()) return absl::OkStatus();
    names().Add("messages[0]", "instructions");
    chat()["messages"].push_back(ChatMessageJson("system", instructions));
    return absl::OkStatus();
  }

  absl::Status ReadConversation() {
    std::string previous;
    reader_.String("previous_response_id", &previous);
    const Json* const input = reader_.Raw("input");
    SPLICE_RETURN_IF_ERROR(reader_.status());
    Echo("previous_response_id", nullptr);
    ResponseItems items(&out_.translated);
    if (!previous.empty()) {
      absl::StatusOr<EarlierConversation> kept = earlier_.conversation(previous);
      if (!kept.ok()) return SetParam(kept.status(), "previous_response_id");
      out_.items = std::move(kept->items);
      out_.session = std::move(kept->session);
      for (const Json& item : out_.items) SPLICE_RETURN_IF_ERROR(items.Add(item, "previous_response_id"));
    }
    if (input == nullptr) return ParamError("input", "is required");
    if (input->is_string()) {
      Json message = ChatMessageJson("user", *input);
      SPLICE_RETURN_IF_ERROR(items.Add(message, "input"));
      out_.items.push_back(std::move(message));
    } else if (input->is_array()) {
      for (size_t i = 0; i < input->size(); ++i)
        SPLICE_RETURN_IF_ERROR(AddItem((*input)[i], fmt::format("input[{}]", i), &items));
    } else {
      return ParamError("input", "must be a string or a list of items, got {}", DescribeJson(*input));
    }
    items.Finish();
    if (out_.items.empty()) return ParamError("input", "must hold at least one item");
    return absl::OkStatus();
  }

  absl::Status AddItem(const Json& item, const std::string& path, ResponseItems* items) {
    const bool is_reference = item.is_object() && item.value("type", Json()) == Json("item_reference");
    if (!is_reference) {
      SPLICE_RETURN_IF_ERROR(items->Add(item, path));
      out_.items.push_back(item);
      return absl::OkStatus();
    }
    const Json id = item.value("id", Json());
    if (!id.is_string()) return ParamError(path + ".id", "must be a string");
    absl::StatusOr<Json> kept = earlier_.item(id.get<std::string>());
    if (!kept.ok()) return SetParam(kept.status(), path + ".id");
    SPLICE_RETURN_IF_ERROR(items->Add(*kept, path));
    out_.items.push_back(*std::move(kept));
    return absl::OkStatus();
  }

  absl::Status ReadTools() {
    const Json* const tools = reader_.List("tools");
    SPLICE_RETURN_IF_ERROR(reader_.status());
    Echo("tools", Json::array());
    if (tools == nullptr || tools->empty()) return absl::OkStatus();
    Json functions = Json::array();
    for (size_t i = 0; i < tools->size(); ++i) {
      SPLICE_ASSIGN_OR_RETURN(Json function, ReadTool((*tools)[i], fmt::format("tools[{}]", i)));
      functions.push_back(std::move(function));
    }
    chat()["tools"] = std::move(functions);
    return absl::OkStatus();
  }

  absl::StatusOr<Json> ReadTool(const Json& value, const std::string& path) {
    ObjectReader reader(value, path + ".");
    std::string type, name, description;
    bool strict = false;
    reader.String("type", &type);
    reader.String("name", &name);
    reader.String("description", &description);
    reader.Bool("strict", &strict);
    const Json* const parameters = type == "function" ? reader.Object("parameters") : nullptr;
    SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(nullptr));
    if (type != "function") return ParamError(path + ".type", "\"{}\" is not served; only \"function\" is", type);
    any_strict_ = any_strict_ || strict;
    names().Add(path + ".function", path);
    Json function = Json::object();
    function["name"] = name;
    if (!description.empty()) function["description"] = description;
    if (parameters != nullptr) function["parameters"] = *parameters;
    Json tool = Json::object();
    tool["type"] = "function";
    tool["function"] = std::move(function);
    return tool;
  }

  absl::Status ReadToolChoice() {
    bool parallel = true;
    reader_.Bool("parallel_tool_calls", &parallel);
    const Json* const choice = reader_.Raw("tool_choice");
    SPLICE_RETURN_IF_ERROR(reader_.status());
    out_.echo["parallel_tool_calls"] = parallel;
    Echo("tool_choice", "auto");
    bool forced = choice != nullptr && *choice == Json("required");
    if (choice != nullptr && choice->is_object()) {
      ObjectReader reader(*choice, "tool_choice.");
      std::string type, name;
      reader.String("type", &type);
      reader.String("name", &name);
      SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(nullptr));
      if (type != "function") return ParamError("tool_choice.type", "\"{}\" is not served; only \"function\" is", type);
      if (name.empty()) return ParamError("tool_choice.name", "is required");
      forced = true;
      chat()["tool_choice"] = {{"type", "function"}, {"function", {{"name", name}}}};
    } else if (choice != nullptr) {
      chat()["tool_choice"] = *choice;
    }
    // The model may call otherwise, and as often as it likes.
    if (!forced && !parallel) Ignored("parallel_tool_calls");
    if (!forced && any_strict_) Ignored("tools.strict");
    if (forced) chat()["parallel_tool_calls"] = parallel;
    return absl::OkStatus();
  }

  absl::Status ReadText() {
    const Json* const text = reader_.Object("text");
    SPLICE_RETURN_IF_ERROR(reader_.status());
    out_.echo["text"] = text == nullptr ? Json{{"format", {{"type", "text"}}}} : *text;
    if (text == nullptr) return absl::OkStatus();
    ObjectReader reader(*text, "text.");
    const Json* const format = reader.Object("format");
    SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(&out_.translated.ignored));
    if (format == nullptr) return absl::OkStatus();
    ObjectReader inner(*format, "text.format.");
    std::string type;
    inner.String("type", &type);
    Json schema = Json::object();
    for (const char* name : {"name", "description", "strict", "schema"}) {
      if (const Json* const value = inner.Raw(name); value != nullptr) schema[name] = *value;
    }
    SPLICE_RETURN_IF_ERROR(inner.FinishIgnoring(&out_.translated.ignored));
    names().Add("response_format", "text.format");
    names().Add("response_format.json_schema", "text.format");
    Json& chosen = chat()["response_format"];
    chosen = Json::object();
    chosen["type"] = type;
    if (type == "json_schema") chosen["json_schema"] = std::move(schema);
    return absl::OkStatus();
  }

  absl::Status ReadReasoning() {
    const Json* const reasoning = reader_.Object("reasoning");
    SPLICE_RETURN_IF_ERROR(reader_.status());
    std::string effort;
    if (reasoning != nullptr) {
      ObjectReader reader(*reasoning, "reasoning.");
      reader.String("effort", &effort);
      SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(&out_.translated.ignored));
    }
    names().Add("reasoning_effort", "reasoning.effort");
    if (!effort.empty()) chat()["reasoning_effort"] = effort;
    Json& echo = out_.echo["reasoning"];
    echo = Json::object();
    echo["effort"] = effort.empty() ? Json(nullptr) : Json(effort);
    echo["summary"] = nullptr;
    return absl::OkStatus();
  }

  // Members that change nothing, and those that would change the answer and so are refused.
  absl::Status ReadRest() {
    reader_.Refuse({"background", "conversation", "prompt"});
    reader_.Bool("store", &out_.store);
    std::optional<uint64_t> top_logprobs;
    reader_.Uint("top_logprobs", kMaxTopLogprobs, &top_logprobs);
    if (top_logprobs.value_or(0) > 0)
      reader_.Fail(ParamError("top_logprobs", "is not served here: ask a chat for them"));
    std::string truncation;
    reader_.String("truncation", &truncation);
    if (!truncation.empty() && truncation != "disabled") Ignored("truncation");
    if (const Json* const include = reader_.List("include")) ReadInclude(*include);
    if (const Json* const options = reader_.Object("stream_options")) {
      ObjectReader inner(*options, "stream_options.");
      inner.Ignore({"include_obfuscation"});
      reader_.Fail(inner.FinishIgnoring(&out_.translated.ignored));
    }
    const Json* const metadata = reader_.Object("metadata");
    out_.echo["metadata"] = metadata == nullptr ? Json::object() : *metadata;
    for (const char* name : {"max_output_tokens", "max_tool_calls", "prompt_cache_key", "safety_identifier", "user"})
      Echo(name, nullptr);
    reader_.Ignore({"service_tier", "prompt_cache_retention"});
    out_.echo["background"] = false;
    out_.echo["top_logprobs"] = 0;
    out_.echo["truncation"] = "disabled";
    return reader_.status();
  }

  // Results of tools that are not served have nothing to include.
  void ReadInclude(const Json& include) {
    for (const Json& name : include) {
      if (name == Json("message.output_text.logprobs"))
        return reader_.Fail(
            ParamError("include", "message.output_text.logprobs is not served here: ask a chat for them"));
    }
    if (!include.empty()) Ignored("include");
  }

  ObjectReader reader_;
  const EarlierResponses& earlier_;
  ResponsesRequest out_;
  bool any_strict_ = false;  // of the tools
};

}  // namespace

absl::StatusOr<ResponsesRequest> TranslateResponses(const Json& body, const EarlierResponses& earlier) {
  return Translator(body, earlier).Run();
}

}  // namespace spl::router
