#include "services/router/request/openai_request.h"

#include <limits>
#include <optional>
#include <utility>

#include "services/router/request/api_error.h"
#include "services/router/request/json_reader.h"
#include "services/router/request/reuse_json.h"

namespace spl::router {
namespace {

constexpr uint32_t kDefaultCompletionTokens = 16;  // OpenAI's default for /v1/completions

// The sampling fields that both endpoints share.
void ReadSampling(ObjectReader& reader, GenerationRequest* request) {
  Sampling& s = request->sampling;
  reader.Uint32("min_tokens", &s.min_tokens);
  reader.Float("temperature", &s.temperature);
  reader.Float("top_p", &s.top_p);
  reader.Float("min_p", &s.min_p);
  reader.Float("repetition_penalty", &s.repetition_penalty);
  reader.Float("presence_penalty", &s.presence_penalty);
  reader.Float("frequency_penalty", &s.frequency_penalty);
  reader.Seed("seed", &s.seed);
  reader.TokenIds("stop_token_ids", &s.stop_token_ids);
  reader.Bool("ignore_eos", &s.ignore_eos);
  reader.Bool("skip_special_tokens", &request->skip_special_tokens);
  reader.StringOrList("stop", &request->stop);
  if (const Json* top_k = reader.Raw("top_k"); top_k != nullptr && *top_k == Json(-1))
    s.top_k = 0;  // vLLM's "all"
  else
    reader.Uint32("top_k", &s.top_k);
  reader.Uint32("n", &s.n);
}

void ReadMaxTokens(ObjectReader& reader, const char* name, std::optional<uint32_t>* out) {
  std::optional<uint64_t> value;
  reader.Uint(name, std::numeric_limits<uint32_t>::max(), &value);
  if (!value.has_value()) return;
  if (*value == 0) return reader.Fail(ParamError(name, "must be at least 1, got 0"));
  *out = static_cast<uint32_t>(*value);
}

// {"token id": bias}; JSON names are strings.
void ReadLogitBias(ObjectReader& reader, std::map<uint32_t, float>* out) {
  const Json* value = reader.Raw("logit_bias");
  if (value == nullptr) return;
  if (!value->is_object()) return reader.Fail(ParamError("logit_bias", "must be an object, got {}", TypeName(*value)));
  for (const auto& item : value->items()) {
    const std::string& name = item.key();
    const bool digits = !name.empty() && name.size() <= 9 && name.find_first_not_of("0123456789") == std::string::npos;
    if (!digits) return reader.Fail(ParamError("logit_bias", "\"{}\" is not a token id", name));
    if (!item.value().is_number()) {
      return reader.Fail(ParamError("logit_bias", "the bias of token {} must be a number", name));
    }
    const double bias = item.value().get<double>();
    if (!(bias >= -100 && bias <= 100)) {
      return reader.Fail(ParamError("logit_bias", "must be between -100 and 100, got {}", item.value().dump()));
    }
    (*out)[static_cast<uint32_t>(std::stoul(name))] = static_cast<float>(bias);
  }
}

void ReadStream(ObjectReader& reader, StreamOptions* out) {
  reader.Bool("stream", &out->stream);
  const Json* options = reader.Raw("stream_options");
  if (options == nullptr) return;
  if (!out->stream) return reader.Fail(ParamError("stream_options", "is only allowed when stream is true"));
  ObjectReader inner(*options, "stream_options.");
  inner.Bool("include_usage", &out->include_usage);
  inner.Ignore({"include_obfuscation"});
  reader.Fail(inner.Finish());
}

// [{"begin","end","namespace"}, …] of a prompt of token ids.
absl::StatusOr<std::vector<TokenSegment>> ReadTokenSegments(const Json& value) {
  if (!value.is_array()) return ParamError("splice.segments", "must be a list, got {}", TypeName(value));
  std::vector<TokenSegment> segments;
  for (size_t i = 0; i < value.size(); ++i) {
    ObjectReader reader(value[i], fmt::format("splice.segments[{}].", i));
    TokenSegment segment;
    reader.Uint32("begin", &segment.begin);
    reader.Uint32("end", &segment.end);
    reader.String("namespace", &segment.namespace_name);
    reader.String("knowledge_base", &segment.knowledge_base);
    SPLICE_RETURN_IF_ERROR(reader.Finish());
    if (!segment.namespace_name.empty() && !segment.knowledge_base.empty()) {
      return ParamError(fmt::format("splice.segments[{}].namespace", i), "and knowledge_base exclude each other");
    }
    segments.push_back(std::move(segment));
  }
  return segments;
}

// The Splice extensions, the object "splice" in a body. `token_segments` is null where a prompt of token ids is not
// served.
void ReadSplice(ObjectReader& reader, GenerationRequest* request, std::vector<TokenSegment>* token_segments) {
  const Json* options = reader.Raw("splice");
  if (options == nullptr) return;
  ObjectReader inner(*options, "splice.");
  inner.String("namespace", &request->namespace_name);
  inner.String("session", &request->session);
  ReadReuseOptions(inner, request->reuse);
  if (const Json* segments = inner.Raw("segments"); segments != nullptr) {
    absl::StatusOr<std::vector<TokenSegment>> read = ReadTokenSegments(*segments);
    if (!read.ok()) return reader.Fail(read.status());
    if (token_segments == nullptr) {
      return reader.Fail(ParamError("splice.segments",
                                    "is for prompts of token ids; mark text with content parts of "
                                    "type \"segment\""));
    }
    *token_segments = *std::move(read);
  }
  reader.Fail(inner.Finish());
}

// Fields of OpenAI's API that change nothing here, and those that would change the answer and so are refused.
void ReadCommonRest(ObjectReader& reader, GenerationRequest* request) {
  std::optional<double> priority;
  reader.Number("priority", &priority);
  if (priority.has_value()) {
    const bool whole = std::floor(*priority) == *priority && std::abs(*priority) <= kMaxPriority;
    if (whole) {
      request->priority = static_cast<int32_t>(*priority);
    } else {
      reader.Fail(ParamError("priority", "must be an integer between {} and {}", -kMaxPriority, kMaxPriority));
    }
  }
  reader.Ignore({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                 "prompt_cache_retention", "parallel_tool_calls"});
  reader.Refuse({"tools", "functions", "function_call", "audio", "prediction", "web_search_options", "reasoning_effort",
                 "verbosity", "use_beam_search", "prompt_logprobs", "guided_json", "guided_regex", "guided_choice",
                 "guided_grammar", "suffix", "logits_processors"});
  const Json* choice = reader.Raw("tool_choice");
  if (choice != nullptr && *choice != Json("none") && *choice != Json("auto")) {
    reader.Fail(ParamError("tool_choice", "tools are not served by this build"));
  }
  const Json* modalities = reader.Raw("modalities");
  if (modalities != nullptr && *modalities != Json::array({"text"})) {
    reader.Fail(ParamError("modalities", "only [\"text\"] is served"));
  }
  const Json* format = reader.Raw("response_format");
  if (format != nullptr && (!format->is_object() || format->value("type", Json()) != Json("text"))) {
    reader.Fail(ParamError("response_format", "only {{\"type\":\"text\"}} is served by this build"));
  }
}

// best_of is only meaningful as "the same as n".
void ReadBestOf(ObjectReader& reader, uint32_t n) {
  std::optional<uint64_t> best_of;
  reader.Uint("best_of", std::numeric_limits<uint32_t>::max(), &best_of);
  if (best_of.has_value() && *best_of != n) {
    reader.Fail(ParamError("best_of", "is served only when equal to n ({})", n));
  }
}

// [{"type":"text","text":…}, {"type":"segment","text":…,"namespace":…},
// {"type":"segment","knowledge_base":…,"document":…}, …] joined, with marks for the segments; other
// parts are refused by name.
absl::StatusOr<std::string> ReadContentParts(const Json& parts, const std::string& field, SegmentMarks* segments) {
  std::string text;
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string path = fmt::format("{}[{}]", field, i);
    ObjectReader part(parts[i], path + ".");
    std::string type;
    part.String("type", &type);
    if (type != "text" && type != "segment") {
      if (!parts[i].is_object()) return part.Finish();
      return ParamError(path + ".type", "\"{}\" is not served; content parts are of type \"text\" or \"segment\"",
                        type);
    }
    PromptSegment piece{.text = {}, .namespace_name = {}, .field = path};
    part.String("text", &piece.text);
    if (type == "segment") {
      part.String("namespace", &piece.namespace_name);
      part.String("knowledge_base", &piece.knowledge_base);
      part.String("document", &piece.document);
    }
    SPLICE_RETURN_IF_ERROR(part.Finish());
    SPLICE_RETURN_IF_ERROR(CheckSource(piece, part.Has("text")));
    text += type == "text" ? std::move(piece.text) : segments->Add(std::move(piece));
  }
  return text;
}

absl::StatusOr<tokenizer::ChatMessage> ReadMessage(const Json& value, const std::string& path, SegmentMarks* segments) {
  ObjectReader reader(value, path + ".");
  tokenizer::ChatMessage message;
  reader.String("role", &message.role);
  reader.Refuse({"tool_calls", "tool_call_id", "function_call", "name", "audio", "refusal"});
  const Json* content = reader.Raw("content");
  SPLICE_RETURN_IF_ERROR(reader.Finish());
  if (message.role == "developer") message.role = "system";  // OpenAI's newer word for the same thing
  if (message.role != "system" && message.role != "user" && message.role != "assistant") {
    return ParamError(path + ".role", "must be \"system\", \"developer\", \"user\" or \"assistant\", got \"{}\"",
                      message.role);
  }
  if (content == nullptr) return ParamError(path + ".content", "is required");
  if (content->is_string()) {
    message.content = content->get<std::string>();
  } else if (content->is_array()) {
    SPLICE_ASSIGN_OR_RETURN(message.content, ReadContentParts(*content, path + ".content", segments));
  } else {
    return ParamError(path + ".content", "must be a string or a list of parts, got {}", TypeName(*content));
  }
  return message;
}

absl::StatusOr<ChatPrompt> ReadMessages(const Json* messages) {
  if (messages == nullptr) return ParamError("messages", "is required");
  if (!messages->is_array()) return ParamError("messages", "must be a list, got {}", TypeName(*messages));
  if (messages->empty()) return ParamError("messages", "must hold at least one message");
  ChatPrompt chat;
  for (size_t i = 0; i < messages->size(); ++i) {
    SPLICE_ASSIGN_OR_RETURN(tokenizer::ChatMessage message,
                            ReadMessage((*messages)[i], fmt::format("messages[{}]", i), &chat.segments));
    chat.messages.push_back(std::move(message));
  }
  return chat;
}

std::vector<TokenId> ToTokenIds(const std::vector<uint32_t>& ids) { return {ids.begin(), ids.end()}; }

// A string, a list of token ids, a list with exactly one of these, or a list of content parts.
absl::StatusOr<Prompt> ReadPrompt(const Json* prompt, std::vector<TokenSegment> token_segments) {
  const auto of_ids = [&](const std::vector<uint32_t>& ids) {
    return token_segments.empty() ? Prompt(ToTokenIds(ids)) : TokenizedPrompt{ToTokenIds(ids), token_segments};
  };
  const auto of_text = [&](Prompt text) -> absl::StatusOr<Prompt> {
    if (token_segments.empty()) return text;
    return ParamError("splice.segments", "is for prompts of token ids; mark text with parts of type \"segment\"");
  };
  if (prompt == nullptr) return ParamError("prompt", "is required");
  if (prompt->is_string()) return of_text(prompt->get<std::string>());
  if (!prompt->is_array()) {
    return ParamError("prompt", "must be a string, a list of token ids or a list of parts, got {}", TypeName(*prompt));
  }
  if (prompt->empty()) return ParamError("prompt", "must not be empty");
  const Json& first = prompt->front();
  if (first.is_object()) {
    SegmentedText text;
    SPLICE_ASSIGN_OR_RETURN(text.text, ReadContentParts(*prompt, "prompt", &text.segments));
    return of_text(std::move(text));
  }
  if (first.is_string() || first.is_array()) {
    if (prompt->size() > 1) {
      return ParamError("prompt", "holds {} prompts; one prompt per request is served", prompt->size());
    }
    if (first.is_string()) return of_text(first.get<std::string>());
    if (first.empty()) return ParamError("prompt", "must not be empty");
    SPLICE_ASSIGN_OR_RETURN(std::vector<uint32_t> ids, ReadTokenIds(first, "prompt"));
    return of_ids(ids);
  }
  SPLICE_ASSIGN_OR_RETURN(std::vector<uint32_t> ids, ReadTokenIds(*prompt, "prompt"));
  return of_ids(ids);
}

// chat: "logprobs" switches, "top_logprobs" counts.
void ReadChatLogprobs(ObjectReader& reader, std::optional<uint32_t>* out) {
  bool enabled = false;
  reader.Bool("logprobs", &enabled);
  std::optional<uint64_t> top;
  reader.Uint("top_logprobs", kMaxTopLogprobs, &top);
  if (top.has_value() && !enabled) {
    return reader.Fail(ParamError("top_logprobs", "is only allowed when logprobs is true"));
  }
  if (enabled) *out = static_cast<uint32_t>(top.value_or(0));
}

}  // namespace

absl::StatusOr<ApiRequest> ParseChatBody(std::string_view body, const Sampling& defaults) {
  SPLICE_ASSIGN_OR_RETURN(const Json json, ParseJson(body));
  ApiRequest out;
  GenerationRequest& request = out.generation;
  request.api = "chat";
  request.sampling = defaults;
  ObjectReader reader(json, "");
  reader.String("model", &request.model);
  ReadSampling(reader, &request);
  ReadMaxTokens(reader, "max_tokens", &request.sampling.max_tokens);
  ReadMaxTokens(reader, "max_completion_tokens", &request.sampling.max_tokens);  // the newer name wins
  ReadLogitBias(reader, &request.sampling.logit_bias);
  ReadChatLogprobs(reader, &request.sampling.logprobs);
  ReadStream(reader, &out.stream);
  ReadSplice(reader, &request, nullptr);
  ReadCommonRest(reader, &request);
  reader.Bool("echo", &request.echo);
  bool add_generation_prompt = true;
  reader.Bool("add_generation_prompt", &add_generation_prompt);
  const Json* messages = reader.Raw("messages");
  SPLICE_RETURN_IF_ERROR(reader.Finish());
  if (request.echo) return ParamError("echo", "is served on /v1/completions only");
  SPLICE_ASSIGN_OR_RETURN(ChatPrompt chat, ReadMessages(messages));
  chat.add_generation_prompt = add_generation_prompt;
  request.prompt = std::move(chat);
  SPLICE_RETURN_IF_ERROR(ValidateRequest(request));
  return out;
}

absl::StatusOr<ApiRequest> ParseCompletionBody(std::string_view body, const Sampling& defaults) {
  SPLICE_ASSIGN_OR_RETURN(const Json json, ParseJson(body));
  ApiRequest out;
  GenerationRequest& request = out.generation;
  request.api = "completions";
  request.sampling = defaults;
  request.sampling.max_tokens = kDefaultCompletionTokens;
  ObjectReader reader(json, "");
  reader.String("model", &request.model);
  ReadSampling(reader, &request);
  ReadMaxTokens(reader, "max_tokens", &request.sampling.max_tokens);
  ReadLogitBias(reader, &request.sampling.logit_bias);
  std::optional<uint64_t> logprobs;
  reader.Uint("logprobs", kMaxTopLogprobs, &logprobs);
  if (logprobs.has_value()) request.sampling.logprobs = static_cast<uint32_t>(*logprobs);
  reader.Bool("echo", &request.echo);
  reader.Bool("add_special_tokens", &request.add_special_tokens);
  ReadBestOf(reader, request.sampling.n);
  ReadStream(reader, &out.stream);
  std::vector<TokenSegment> token_segments;
  ReadSplice(reader, &request, &token_segments);
  ReadCommonRest(reader, &request);
  const Json* prompt = reader.Raw("prompt");
  SPLICE_RETURN_IF_ERROR(reader.Finish());
  SPLICE_ASSIGN_OR_RETURN(request.prompt, ReadPrompt(prompt, std::move(token_segments)));
  SPLICE_RETURN_IF_ERROR(ValidateRequest(request));
  return out;
}

absl::StatusOr<TokenizeRequest> ParseTokenizeBody(std::string_view body) {
  SPLICE_ASSIGN_OR_RETURN(const Json json, ParseJson(body));
  TokenizeRequest out;
  ObjectReader reader(json, "");
  reader.String("model", &out.model);
  reader.Bool("return_token_strs", &out.return_token_strs);
  const Json* prompt = reader.Raw("prompt");
  const Json* messages = reader.Raw("messages");
  bool add_generation_prompt = true;
  out.add_special_tokens = messages == nullptr;  // a rendered template brings its own begin token
  reader.Bool("add_special_tokens", &out.add_special_tokens);
  reader.Bool("add_generation_prompt", &add_generation_prompt);
  reader.Refuse({"continue_final_message"});
  SPLICE_RETURN_IF_ERROR(reader.Finish());
  if (prompt != nullptr && messages != nullptr) return ParamError("prompt", "and messages exclude each other");
  if (messages != nullptr) {
    SPLICE_ASSIGN_OR_RETURN(ChatPrompt chat, ReadMessages(messages));
    chat.add_generation_prompt = add_generation_prompt;
    out.prompt = std::move(chat);
    return out;
  }
  if (prompt == nullptr) return ParamError("prompt", "or messages is required");
  if (!prompt->is_string()) return ParamError("prompt", "must be a string, got {}", TypeName(*prompt));
  out.prompt = prompt->get<std::string>();
  return out;
}

absl::StatusOr<DetokenizeRequest> ParseDetokenizeBody(std::string_view body) {
  SPLICE_ASSIGN_OR_RETURN(const Json json, ParseJson(body));
  DetokenizeRequest out;
  ObjectReader reader(json, "");
  reader.String("model", &out.model);
  const bool given = reader.Has("tokens");
  std::vector<uint32_t> ids;
  reader.TokenIds("tokens", &ids);
  SPLICE_RETURN_IF_ERROR(reader.Finish());
  if (!given) return ParamError("tokens", "is required");
  out.tokens = ToTokenIds(ids);
  return out;
}

}  // namespace spl::router
