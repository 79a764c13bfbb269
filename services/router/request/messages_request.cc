#include "services/router/request/messages_request.h"

#include <utility>

#include "services/router/request/api_error.h"

namespace spl::router {
namespace {

// The message that some blocks of one turn become.
struct Turn {
  std::string role;
  std::string path;  // of the turn in the client's body
  Json parts = Json::array();
  Json calls = Json::array();
  std::string reasoning;
};

class Translator {
 public:
  explicit Translator(const Json& body) : reader_(body, "") {}

  absl::StatusOr<TranslatedRequest> Run() {
    out_.chat["messages"] = Json::array();
    SPLICE_RETURN_IF_ERROR(ReadSystem());
    SPLICE_RETURN_IF_ERROR(ReadTurns());
    SPLICE_RETURN_IF_ERROR(ReadTools());
    SPLICE_RETURN_IF_ERROR(ReadToolChoice());
    CopySharedMembers(reader_, &out_.chat);
    SPLICE_RETURN_IF_ERROR(ReadThinking());
    SPLICE_RETURN_IF_ERROR(ReadOutputConfig());
    if (const Json* const limit = reader_.Raw("max_tokens")) out_.chat["max_tokens"] = *limit;
    if (const Json* const stops = reader_.List("stop_sequences")) out_.chat["stop"] = *stops;
    out_.names.Add("stop", "stop_sequences");
    reader_.Ignore({"metadata", "service_tier", "cache_control", "inference_geo"});
    reader_.Refuse({"mcp_servers", "container"});
    SPLICE_RETURN_IF_ERROR(reader_.FinishIgnoring(&out_.ignored));
    return std::move(out_);
  }

 private:
  size_t num_messages() const { return out_.chat["messages"].size(); }
  void Push(Json message, const std::string& path) {
    out_.names.Add(fmt::format("messages[{}]", num_messages()), path);
    out_.chat["messages"].push_back(std::move(message));
  }
  void Ignored(const char* name) {
    for (const std::string& known : out_.ignored) {
      if (known == name) return;
    }
    out_.ignored.emplace_back(name);
  }

  // A block of text, or a segment, as the chat's part of the same type.
  absl::StatusOr<Json> ReadText(const Json& block, const std::string& path) {
    ObjectReader reader(block, path + ".");
    std::string type, text;
    reader.String("type", &type);
    if (type == "segment") return block;
    if (type == "text") reader.String("text", &text);
    SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(nullptr));
    if (type != "text") return ParamError(path + ".type", "\"{}\" is not served here", type);
    if (!reader.Has("text")) return ParamError(path + ".text", "is required");
    Json part = Json::object();
    part["type"] = "text";
    part["text"] = std::move(text);
    return part;
  }

  // A string, or the parts of a list of blocks of text.
  absl::StatusOr<Json> ReadTexts(const Json& content, const std::string& path) {
    if (content.is_string()) return content;
    if (!content.is_array())
      return ParamError(path, "must be a string or a list of blocks, got {}", DescribeJson(content));
    Json parts = Json::array();
    for (size_t i = 0; i < content.size(); ++i) {
      SPLICE_ASSIGN_OR_RETURN(Json part, ReadText(content[i], fmt::format("{}[{}]", path, i)));
      parts.push_back(std::move(part));
    }
    return parts;
  }

  absl::Status ReadSystem() {
    const Json* const system = reader_.Raw("system");
    if (system == nullptr || system->empty()) return absl::OkStatus();
    SPLICE_ASSIGN_OR_RETURN(Json content, ReadTexts(*system, "system"));
    // An error in a part names system[1] itself.
    out_.names.Add("messages[0].content", "system");
    Push(ChatMessageJson("system", std::move(content)), "system");
    return absl::OkStatus();
  }

  absl::Status ReadTurns() {
    const Json* const turns = reader_.List("messages");
    SPLICE_RETURN_IF_ERROR(reader_.status());
    if (turns == nullptr) return ParamError("messages", "is required");
    if (turns->empty()) return ParamError("messages", "must hold at least one message");
    for (size_t i = 0; i < turns->size(); ++i)
      SPLICE_RETURN_IF_ERROR(ReadTurn((*turns)[i], fmt::format("messages[{}]", i)));
    const Json& last = out_.chat["messages"].back();
    if (last["role"] != "assistant") return absl::OkStatus();
    if (last.contains("tool_calls"))
      return ParamError("messages", "the calls of the last message have no tool_result behind them");
    out_.chat["continue_final_message"] = true;
    return absl::OkStatus();
  }

  absl::Status ReadTurn(const Json& value, const std::string& path) {
    ObjectReader reader(value, path + ".");
    Turn turn{.path = path};
    reader.String("role", &turn.role);
    const Json* const content = reader.Raw("content");
    SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(nullptr));
    if (turn.role != "user" && turn.role != "assistant" && turn.role != "system")
      return ParamError(path + ".role", "must be \"user\", \"assistant\" or \"system\", got \"{}\"", turn.role);
    if (content == nullptr) return ParamError(path + ".content", "is required");
    if (content->is_string()) {
      Push(ChatMessageJson(turn.role.c_str(), *content), path);
      return absl::OkStatus();
    }
    if (!content->is_array())
      return ParamError(path + ".content", "must be a string or a list of blocks, got {}", DescribeJson(*content));
    for (size_t i = 0; i < content->size(); ++i)
      SPLICE_RETURN_IF_ERROR(ReadBlock((*content)[i], fmt::format("{}.content[{}]", path, i), &turn));
    // A turn of results alone is no message of the user.
    const bool empty = turn.parts.empty() && turn.calls.empty() && turn.reasoning.empty();
    if (!empty || content->empty()) Flush(&turn);
    return absl::OkStatus();
  }

  absl::Status ReadBlock(const Json& block, const std::string& path, Turn* turn) {
    ObjectReader reader(block, path + ".");
    std::string type;
    reader.String("type", &type);
    SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(nullptr));
    const bool is_answer = turn->role == "assistant";
    if (type == "tool_result" && turn->role == "user") return ReadResult(block, path, turn);
    if (type == "tool_use" && is_answer) return ReadCall(block, path, turn);
    if (type == "thinking" && is_answer) return ReadThought(block, path, turn);
    if (type == "redacted_thinking" && is_answer) {
      Ignored("messages.redacted_thinking");  // nobody but its maker can read it
      return absl::OkStatus();
    }
    if (type != "text" && type != "segment")
      return ParamError(path + ".type", "\"{}\" is not served in a message of role {}", type, turn->role);
    SPLICE_ASSIGN_OR_RETURN(Json part, ReadText(block, path));
    out_.names.Add(fmt::format("messages[{}].content[{}]", num_messages(), turn->parts.size()), path);
    turn->parts.push_back(std::move(part));
    return absl::OkStatus();
  }

  // The blocks in front of a result are a message of their own.
  absl::Status ReadResult(const Json& block, const std::string& path, Turn* turn) {
    ObjectReader reader(block, path + ".");
    std::string id;
    bool is_error = false;
    reader.String("tool_use_id", &id);
    reader.Bool("is_error", &is_error);
    const Json* const content = reader.Raw("content");
    SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(nullptr));
    if (id.empty()) return ParamError(path + ".tool_use_id", "is required");
    Json texts = "";
    if (content != nullptr) {
      SPLICE_ASSIGN_OR_RETURN(texts, ReadTexts(*content, path + ".content"));
    }
    if (!turn->parts.empty()) Flush(turn);
    Json message = ChatMessageJson("tool", std::move(texts));
    message["tool_call_id"] = id;
    if (is_error) message["is_error"] = true;
    Push(std::move(message), path);
    return absl::OkStatus();
  }

  absl::Status ReadCall(const Json& block, const std::string& path, Turn* turn) {
    ObjectReader reader(block, path + ".");
    std::string id, name;
    reader.String("id", &id);
    reader.String("name", &name);
    const Json* const input = reader.Object("input");
    SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(nullptr));
    if (id.empty()) return ParamError(path + ".id", "is required");
    if (input == nullptr) return ParamError(path + ".input", "is required");
    const std::string call = fmt::format("messages[{}].tool_calls[{}]", num_messages(), turn->calls.size());
    out_.names.Add(call, path);
    out_.names.Add(call + ".function", path);
    turn->calls.push_back(ChatCallJson(id, name, *input));
    return absl::OkStatus();
  }

  absl::Status ReadThought(const Json& block, const std::string& path, Turn* turn) {
    ObjectReader reader(block, path + ".");
    std::string text;
    reader.String("thinking", &text);
    SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(nullptr));
    turn->reasoning += text;
    return absl::OkStatus();
  }

  void Flush(Turn* turn) {
    Json content = std::exchange(turn->parts, Json::array());
    if (content.empty()) content = turn->calls.empty() ? Json("") : Json(nullptr);
    Json message = ChatMessageJson(turn->role.c_str(), std::move(content));
    if (!turn->reasoning.empty()) message["reasoning_content"] = turn->reasoning;
    if (!turn->calls.empty()) message["tool_calls"] = std::move(turn->calls);
    Push(std::move(message), turn->path);
  }

  absl::Status ReadTools() {
    const Json* const tools = reader_.List("tools");
    SPLICE_RETURN_IF_ERROR(reader_.status());
    if (tools == nullptr || tools->empty()) return absl::OkStatus();
    Json functions = Json::array();
    for (size_t i = 0; i < tools->size(); ++i) {
      SPLICE_ASSIGN_OR_RETURN(Json function, ReadTool((*tools)[i], fmt::format("tools[{}]", i)));
      functions.push_back(std::move(function));
    }
    out_.chat["tools"] = std::move(functions);
    return absl::OkStatus();
  }

  absl::StatusOr<Json> ReadTool(const Json& value, const std::string& path) {
    ObjectReader reader(value, path + ".");
    std::string type = "custom", name, description;
    reader.String("type", &type);
    reader.String("name", &name);
    reader.String("description", &description);
    bool strict = false;
    reader.Bool("strict", &strict);
    any_strict_ = any_strict_ || strict;
    const Json* const schema = type == "custom" ? reader.Object("input_schema") : nullptr;
    SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(nullptr));
    if (type != "custom")
      return ParamError(path + ".type", "\"{}\" is not served; only tools with an input_schema are", type);
    if (schema == nullptr) return ParamError(path + ".input_schema", "is required");
    out_.names.Add(path + ".function", path);
    out_.names.Add(path + ".function.parameters", path + ".input_schema");
    Json function = Json::object();
    function["name"] = name;
    if (!description.empty()) function["description"] = description;
    function["parameters"] = *schema;
    Json tool = Json::object();
    tool["type"] = "function";
    tool["function"] = std::move(function);
    return tool;
  }

  absl::Status ReadToolChoice() {
    const Json* const choice = reader_.Raw("tool_choice");
    std::string type = "auto", name;
    bool one = false;
    if (choice != nullptr) {
      ObjectReader reader(*choice, "tool_choice.");
      reader.String("type", &type);
      reader.String("name", &name);
      reader.Bool("disable_parallel_tool_use", &one);
      SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(&out_.ignored));
    }
    const bool forced = type == "any" || type == "tool";
    // The model may call otherwise, and as often as it likes.
    if (!forced && one) Ignored("tool_choice.disable_parallel_tool_use");
    if (!forced && any_strict_) Ignored("tools.strict");
    if (forced && one) out_.chat["parallel_tool_calls"] = false;
    if (type == "auto" || type == "none") {
      if (choice != nullptr) out_.chat["tool_choice"] = type;
    } else if (type == "any") {
      out_.chat["tool_choice"] = "required";
    } else if (type == "tool") {
      if (name.empty()) return ParamError("tool_choice.name", "is required");
      out_.names.Add("tool_choice.function", "tool_choice");
      out_.chat["tool_choice"] = {{"type", "function"}, {"function", {{"name", name}}}};
    } else {
      return ParamError("tool_choice.type", "must be \"auto\", \"any\", \"tool\" or \"none\", got \"{}\"", type);
    }
    return absl::OkStatus();
  }

  absl::Status ReadThinking() {
    const Json* const thinking = reader_.Raw("thinking");
    if (thinking == nullptr) return absl::OkStatus();
    ObjectReader reader(*thinking, "thinking.");
    std::string type;
    reader.String("type", &type);
    SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(&out_.ignored));
    out_.names.Add("enable_thinking", "thinking");
    if (type == "enabled" || type == "disabled") {
      SetTemplateVariable(&out_.chat, "enable_thinking", type == "enabled");
    } else if (type != "adaptive") {
      return ParamError("thinking.type", "must be \"enabled\", \"disabled\" or \"adaptive\", got \"{}\"", type);
    }
    return absl::OkStatus();
  }

  absl::Status ReadOutputConfig() {
    const Json* const config = reader_.Raw("output_config");
    if (config == nullptr) return absl::OkStatus();
    ObjectReader reader(*config, "output_config.");
    std::string effort, type;
    reader.String("effort", &effort);
    const Json* const format = reader.Object("format");
    SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(&out_.ignored));
    out_.names.Add("reasoning_effort", "output_config.effort");
    if (!effort.empty()) out_.chat["reasoning_effort"] = effort;
    if (format == nullptr) return absl::OkStatus();
    ObjectReader inner(*format, "output_config.format.");
    inner.String("type", &type);
    const Json* const schema = inner.Object("schema");
    SPLICE_RETURN_IF_ERROR(inner.FinishIgnoring(nullptr));
    if (type != "json_schema")
      return ParamError("output_config.format.type", "must be \"json_schema\", got \"{}\"", type);
    if (schema == nullptr) return ParamError("output_config.format.schema", "is required");
    out_.names.Add("response_format", "output_config.format");
    out_.names.Add("response_format.json_schema", "output_config.format");
    out_.chat["response_format"] = {{"type", "json_schema"},
                                    {"json_schema", {{"name", "answer"}, {"strict", true}, {"schema", *schema}}}};
    return absl::OkStatus();
  }

  ObjectReader reader_;
  TranslatedRequest out_;
  bool any_strict_ = false;  // of the tools
};

}  // namespace

absl::StatusOr<TranslatedRequest> TranslateMessages(const Json& body) { return Translator(body).Run(); }

}  // namespace spl::router
