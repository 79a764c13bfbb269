#include "services/router/request/openai_request.h"

#include <iterator>
#include <limits>
#include <optional>
#include <utility>

#include "services/router/request/api_error.h"
#include "services/router/request/chat_messages.h"
#include "services/router/request/completion_prompts.h"
#include "services/router/request/json_reader.h"
#include "services/router/request/reuse_json.h"
#include "services/router/request/structured_output_json.h"

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
  if (!value->is_object())
    return reader.Fail(ParamError("logit_bias", "must be an object, got {}", DescribeJson(*value)));
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

void ReadStream(ObjectReader& reader, StreamOptions* out, std::vector<std::string>* ignored) {
  reader.Bool("stream", &out->stream);
  const Json* options = reader.Raw("stream_options");
  if (options == nullptr) return;
  if (!out->stream) return reader.Fail(ParamError("stream_options", "is only allowed when stream is true"));
  ObjectReader inner(*options, "stream_options.");
  inner.Bool("include_usage", &out->include_usage);
  inner.Bool("continuous_usage_stats", &out->continuous_usage);
  inner.Ignore({"include_obfuscation"});
  reader.Fail(inner.FinishIgnoring(ignored));
}

// [{"begin","end","namespace"}, …] of a prompt of token ids.
absl::StatusOr<std::vector<TokenSegment>> ReadTokenSegments(const Json& value) {
  if (!value.is_array()) return ParamError("splice.segments", "must be a list, got {}", DescribeJson(value));
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
  reader.Ignore(
      {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"});
  reader.Refuse({"functions", "function_call", "audio", "prediction", "web_search_options", "verbosity",
                 "use_beam_search", "suffix", "logits_processors", "bad_words", "allowed_token_ids",
                 "include_stop_str_in_output", "truncate_prompt_tokens", "chat_template"});
  ReadStructuredOutput(reader, &request->sampling);
  const Json* modalities = reader.Raw("modalities");
  if (modalities != nullptr && *modalities != Json::array({"text"})) {
    reader.Fail(ParamError("modalities", "only [\"text\"] is served"));
  }
}

// Returns whether the model may call tools: not with "none".
bool ReadToolChoice(ObjectReader& reader, const Sampling& sampling, std::optional<ForcedCalls>* forced) {
  bool parallel = true;
  reader.Bool("parallel_tool_calls", &parallel);
  const Json* choice = reader.Raw("tool_choice");
  if (choice == nullptr || *choice == Json("auto")) return true;
  if (*choice == Json("none")) return false;
  if (*choice == Json("required")) {
    *forced = ForcedCalls{.one = !parallel};
  } else if (choice->is_object() && choice->value("type", Json()) == Json("function")) {
    ObjectReader outer(*choice, "tool_choice.");
    const Json* const function = outer.Raw("function");
    const Json name = function != nullptr && function->is_object() ? function->value("name", Json()) : Json();
    if (!name.is_string()) {
      reader.Fail(ParamError("tool_choice.function.name", "must be a string"));
      return true;
    }
    *forced = ForcedCalls{.name = name.get<std::string>(), .one = true};
  } else {
    reader.Fail(ParamError("tool_choice", "must be \"auto\", \"none\", \"required\" or name a function"));
    return true;
  }
  if (sampling.structured_output.has_value())
    reader.Fail(ParamError("tool_choice", "forces a call, and {} another answer", sampling.structured_field));
  return true;
}

// best_of is only meaningful as "the same as n".
void ReadBestOf(ObjectReader& reader, uint32_t n) {
  std::optional<uint64_t> best_of;
  reader.Uint("best_of", std::numeric_limits<uint32_t>::max(), &best_of);
  if (best_of.has_value() && *best_of != n) {
    reader.Fail(ParamError("best_of", "is served only when equal to n ({})", n));
  }
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

// With echo, logprobs are of the prompt, too. A stream has no place for a list that is vLLM's own.
void ReadPromptLogprobs(ObjectReader& reader, ApiRequest* out) {
  std::optional<uint64_t> asked;
  reader.Uint("prompt_logprobs", kMaxTopLogprobs, &asked);
  if (asked.has_value()) out->prompt_logprobs = static_cast<uint32_t>(*asked);
  if (asked.has_value() && out->stream.stream)
    reader.Fail(ParamError("prompt_logprobs", "is served without stream; with echo, logprobs are of the prompt, too"));
  AskPromptLogprobs(out->prompt_logprobs, out->generation);
}

}  // namespace

absl::StatusOr<ApiRequest> ParseChatBody(std::string_view body, const Sampling& defaults) {
  SPLICE_ASSIGN_OR_RETURN(const Json json, ParseJson(body));
  return ParseChat(json, defaults);
}

absl::StatusOr<ApiRequest> ParseChat(const Json& json, const Sampling& defaults) {
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
  ReadStream(reader, &out.stream, &out.ignored);
  ReadSplice(reader, &request, nullptr);
  ReadCommonRest(reader, &request);
  reader.Bool("echo", &request.echo);
  ReadPromptLogprobs(reader, &out);
  const bool may_call = ReadToolChoice(reader, request.sampling, &out.forced_calls);
  ChatPrompt chat;
  ReadTemplateFields(reader, &chat);
  const Json* messages = reader.Raw("messages");
  SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(&out.ignored));
  if (request.echo) return ParamError("echo", "is served on /v1/completions only");
  SPLICE_RETURN_IF_ERROR(ReadMessages(messages, &chat));
  if (const Json* const tools = reader.Raw("tools"); may_call && tools != nullptr && !tools->empty())
    out.tools_json = tools->dump(-1, ' ', false, Json::error_handler_t::replace);
  if (out.forced_calls.has_value() && out.tools_json.empty())
    return ParamError("tool_choice", "forces a call, and there are no tools");
  request.prompt = std::move(chat);
  SPLICE_RETURN_IF_ERROR(ValidateRequest(request));
  return out;
}

absl::Status ForceCalls(const OutputFormat& format, const SpecialTokenId& special, ApiRequest& request) {
  if (!request.forced_calls.has_value()) return absl::OkStatus();
  absl::StatusOr<std::string> tag = ForcedCallsTag(format.tools, request.tools_json, *request.forced_calls, special);
  if (!tag.ok()) return ParamError("tool_choice", "{}", MessageOf(tag.status()));
  Sampling& sampling = request.generation.sampling;
  sampling.structured_output = grammar::GrammarSpec{grammar::GrammarKind::kStructuralTag, *std::move(tag), false};
  sampling.structured_field = "tool_choice";
  return ValidateRequest(request.generation);
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
  ReadStream(reader, &out.stream, &out.ignored);
  std::vector<TokenSegment> token_segments;
  ReadSplice(reader, &request, &token_segments);
  ReadCommonRest(reader, &request);
  ReadPromptLogprobs(reader, &out);
  reader.Ignore({"parallel_tool_calls"});
  reader.Refuse({"tools", "documents", "reasoning_effort", "chat_template_kwargs"});
  const Json* prompt = reader.Raw("prompt");
  SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(&out.ignored));
  SPLICE_ASSIGN_OR_RETURN(std::vector<Prompt> prompts, ReadPrompts(prompt, std::move(token_segments)));
  request.prompt = std::move(prompts.front());
  out.more_prompts.assign(std::make_move_iterator(prompts.begin() + 1), std::make_move_iterator(prompts.end()));
  SPLICE_RETURN_IF_ERROR(ValidateRequest(request));
  if (prompts.size() * request.sampling.n > kMaxPromptContinuations) {
    return ParamError("n", "{} prompts times {} continuations are more than {}", prompts.size(), request.sampling.n,
                      kMaxPromptContinuations);
  }
  if (prompts.size() > 1 && !request.session.empty())
    return ParamError("splice.session", "is for one prompt; this request has {}", prompts.size());
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
  out.add_special_tokens = messages == nullptr;  // a rendered template brings its own begin token
  reader.Bool("add_special_tokens", &out.add_special_tokens);
  ChatPrompt chat;
  ReadTemplateFields(reader, &chat);
  SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(&out.ignored));
  if (prompt != nullptr && messages != nullptr) return ParamError("prompt", "and messages exclude each other");
  if (messages != nullptr) {
    SPLICE_RETURN_IF_ERROR(ReadMessages(messages, &chat));
    out.prompt = std::move(chat);
    return out;
  }
  if (prompt == nullptr) return ParamError("prompt", "or messages is required");
  if (!prompt->is_string()) return ParamError("prompt", "must be a string, got {}", DescribeJson(*prompt));
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
  SPLICE_RETURN_IF_ERROR(reader.FinishIgnoring(&out.ignored));
  if (!given) return ParamError("tokens", "is required");
  out.tokens.assign(ids.begin(), ids.end());
  return out;
}

}  // namespace spl::router
