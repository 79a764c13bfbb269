#include "services/router/request/openai_response.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "services/router/request/api_error.h"
#include "services/tokenizer/byte_level.h"

namespace spl::router {
namespace {

constexpr double kLowestLogprob = -9999.0;  // JSON has no infinity

double JsonLogprob(float logprob) {
  return std::isfinite(logprob) ? std::max<double>(logprob, kLowestLogprob) : kLowestLogprob;
}

size_t CountCharacters(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

// A client runs the calls of an answer that ends by itself.
const char* ReasonOf(FinishReason reason, bool has_calls) {
  return has_calls && reason == FinishReason::kStop ? "tool_calls" : FinishReasonName(reason);
}

OrderedJson CallJson(const ToolCallDelta& call, const std::string& arguments) {
  return {{"id", call.id}, {"type", "function"}, {"function", {{"name", call.name}, {"arguments", arguments}}}};
}

}  // namespace

TokenText TextOf(const tokenizer::Tokenizer& tokenizer, TokenId id) {
  TokenText out;
  const absl::StatusOr<std::string> text =
      tokenizer.Decode(std::span<const TokenId>(&id, 1), {.skip_special_tokens = false});
  if (text.ok()) out.text = *text;
  // Part of a character decodes to U+FFFD; a byte-level vocabulary spells the bytes themselves.
  std::string bytes = out.text;
  if (out.text.find("\xEF\xBF\xBD") != std::string::npos) {
    bytes = tokenizer::CharsToBytes(tokenizer.Piece(id)).value_or(out.text);
  }
  out.bytes.assign(bytes.begin(), bytes.end());
  return out;
}

OrderedJson OpenAiFormatter::Envelope(const char* object) const {
  OrderedJson out;
  out["id"] = head_.id;
  out["object"] = object;
  out["created"] = head_.created;
  out["model"] = head_.model;
  return out;
}

OrderedJson OpenAiFormatter::UsageSoFar() const {
  OrderedJson usage;
  usage["prompt_tokens"] = prompt_tokens_;
  usage["completion_tokens"] = completion_tokens_;
  usage["total_tokens"] = prompt_tokens_ + completion_tokens_;
  return usage;
}

std::string OpenAiFormatter::EchoText(uint32_t index) const {
  const size_t prompt = index / head_.num_continuations;
  return prompt < head_.echo_texts.size() ? head_.echo_texts[prompt] : "";
}

OrderedJson OpenAiFormatter::Chunk(uint32_t index, OrderedJson content, OrderedJson logprobs,
                                   const char* finish_reason) const {
  OrderedJson choice;
  choice["index"] = index;
  choice[head_.chat ? "delta" : "text"] = std::move(content);
  choice["logprobs"] = std::move(logprobs);
  choice["finish_reason"] = finish_reason == nullptr ? OrderedJson(nullptr) : OrderedJson(finish_reason);
  OrderedJson chunk = Envelope(head_.chat ? "chat.completion.chunk" : "text_completion");
  chunk["choices"] = OrderedJson::array({std::move(choice)});
  if (head_.continuous_usage) {
    chunk["usage"] = UsageSoFar();
  } else if (head_.include_usage) {
    chunk["usage"] = nullptr;
  }
  return chunk;
}

void OpenAiFormatter::SetPrompt(uint32_t num_tokens, std::span<const TokenId> prompt) {
  prompt_tokens_ = num_tokens;
  parsers_.SetPrompt(prompt);
}

std::string OpenAiFormatter::ErrorEvents(const absl::Status& status) {
  return "data: " + ErrorBody(status, HttpStatusOf(status)) + "\n\n";
}

// The message's first event has the role, the last one the reason for its end. Between them stand what the text adds,
// in the order reasoning, content, calls; log-probabilities go with the first of these.
std::string OpenAiFormatter::ChatEvents(Collected& state, const Delta& delta, OrderedJson logprobs) const {
  std::string events;
  const auto emit = [&](OrderedJson content) {
    events += SseEvent(Chunk(delta.index, std::move(content), std::exchange(logprobs, nullptr), nullptr));
  };
  if (!state.started) {
    state.parser = parsers_.Make();
    events += SseEvent(Chunk(delta.index, {{"role", "assistant"}, {"content", ""}}, nullptr, nullptr));
  }
  state.started = true;
  const bool ends = delta.finish_reason != FinishReason::kNone;
  OutputDelta added;
  if (state.parser == nullptr) {
    added.content = delta.text;
  } else {
    state.parser->Feed(delta.text, &added);
    if (ends) state.parser->Finish(&added);
  }
  if (!added.reasoning.empty()) emit({{"reasoning_content", added.reasoning}});
  if (!added.content.empty()) emit({{"content", added.content}});
  for (const ToolCallDelta& call : added.tool_calls) {
    state.has_calls = true;
    if (!call.id.empty()) {
      OrderedJson item = CallJson(call, "");
      item["index"] = call.index;
      emit({{"tool_calls", OrderedJson::array({std::move(item)})}});
    }
    if (call.arguments.empty()) continue;
    emit({{"tool_calls", {{{"index", call.index}, {"function", {{"arguments", call.arguments}}}}}}});
  }
  if (!logprobs.is_null()) emit({{"content", ""}});
  return events;
}

std::string OpenAiFormatter::Events(std::span<const Delta> deltas, const FinalInfo* final) {
  std::string events;
  for (size_t i = 0; i < deltas.size(); ++i) {
    const Delta& delta = deltas[i];
    Collected& state = by_index_[delta.index];
    completion_tokens_ += static_cast<uint32_t>(delta.tokens.size());
    OrderedJson logprobs = EchoedLogprobs(delta.prompt.get(), delta.tokens, &state.text_offset);
    const bool ends = delta.finish_reason != FinishReason::kNone;
    OrderedJson content = OrderedJson::object();
    if (head_.chat) {
      events += ChatEvents(state, delta, std::move(logprobs));
      if (!ends) continue;
      logprobs = nullptr;
    } else {
      content = state.started ? delta.text : EchoText(delta.index) + delta.text;
      state.started = true;
    }
    const char* const reason = ends ? ReasonOf(delta.finish_reason, state.has_calls) : nullptr;
    OrderedJson chunk = Chunk(delta.index, std::move(content), std::move(logprobs), reason);
    const bool last = final != nullptr && i + 1 == deltas.size();
    if (last && !head_.include_usage) chunk["splice"] = ReceiptsJson(*final);
    events += SseEvent(chunk);
  }
  if (final == nullptr) return events;
  if (head_.include_usage) {
    OrderedJson chunk = Envelope(head_.chat ? "chat.completion.chunk" : "text_completion");
    chunk["choices"] = OrderedJson::array();
    chunk["usage"] = UsageJson(*final);
    chunk["splice"] = ReceiptsJson(*final);
    events += SseEvent(chunk);
  }
  return events + kSseDone;
}

// The deltas of a stream put together.
OrderedJson OpenAiFormatter::Message(const Collected& state, bool* has_calls) const {
  OutputDelta whole;
  if (const std::unique_ptr<OutputParser> parser = parsers_.Make(); parser != nullptr) {
    parser->Feed(state.text, &whole);
    parser->Finish(&whole);
  } else {
    whole.content = state.text;
  }
  OrderedJson message = {{"role", "assistant"}, {"content", whole.content}, {"refusal", nullptr}};
  if (!whole.reasoning.empty()) message["reasoning_content"] = whole.reasoning;
  *has_calls = !whole.tool_calls.empty();
  if (!*has_calls) return message;
  if (whole.content.empty()) message["content"] = nullptr;
  for (const ToolCallDelta& call : whole.tool_calls) message["tool_calls"].push_back(CallJson(call, call.arguments));
  return message;
}

void OpenAiFormatter::Add(std::span<const Delta> deltas) {
  for (const Delta& delta : deltas) {
    Collected& state = by_index_[delta.index];
    state.text += delta.text;
    state.tokens.insert(state.tokens.end(), delta.tokens.begin(), delta.tokens.end());
    if (delta.prompt != nullptr) state.prompt = delta.prompt;
    if (delta.finish_reason != FinishReason::kNone) state.finish_reason = delta.finish_reason;
  }
}

OrderedJson OpenAiFormatter::Whole(const FinalInfo& final) {
  OrderedJson choices = OrderedJson::array();
  for (const auto& [index, state] : by_index_) {
    OrderedJson choice;
    choice["index"] = index;
    bool has_calls = false;
    if (head_.chat) {
      choice["message"] = Message(state, &has_calls);
    } else {
      choice["text"] = EchoText(index) + state.text;
    }
    size_t text_offset = 0;
    choice["logprobs"] = EchoedLogprobs(state.prompt.get(), state.tokens, &text_offset);
    choice["finish_reason"] = ReasonOf(state.finish_reason, has_calls);
    if (!head_.chat && head_.prompt_logprobs.has_value() && state.prompt != nullptr)
      choice["prompt_logprobs"] = PromptLogprobs(*state.prompt);
    choices.push_back(std::move(choice));
  }
  OrderedJson out = Envelope(head_.chat ? "chat.completion" : "text_completion");
  out["choices"] = std::move(choices);
  // A chat has one prompt, however many choices: vLLM puts the list beside them.
  const bool has_prompt = !by_index_.empty() && by_index_.begin()->second.prompt != nullptr;
  if (head_.chat && head_.prompt_logprobs.has_value() && has_prompt)
    out["prompt_logprobs"] = PromptLogprobs(*by_index_.begin()->second.prompt);
  out["usage"] = UsageJson(final);
  out["splice"] = ReceiptsJson(final);
  return out;
}

OrderedJson OpenAiFormatter::Logprobs(const std::vector<OutputToken>& tokens, size_t* text_offset) const {
  if (!head_.logprobs.has_value() || tokens.empty()) return nullptr;
  return head_.chat ? ChatLogprobs(tokens) : CompletionLogprobs(tokens, text_offset);
}

OrderedJson OpenAiFormatter::ChatLogprobs(const std::vector<OutputToken>& tokens) const {
  const auto entry = [this](TokenId id, float logprob) {
    const TokenText token = TextOf(tokenizer_, id);
    OrderedJson out;
    out["token"] = token.text;
    out["logprob"] = JsonLogprob(logprob);
    out["bytes"] = token.bytes;
    return out;
  };
  OrderedJson content = OrderedJson::array();
  for (const OutputToken& token : tokens) {
    OrderedJson item = entry(token.id, token.logprob);
    item["top_logprobs"] = OrderedJson::array();
    for (const auto& [id, logprob] : token.top) item["top_logprobs"].push_back(entry(id, logprob));
    content.push_back(std::move(item));
  }
  OrderedJson out;
  out["content"] = std::move(content);
  out["refusal"] = nullptr;
  return out;
}

OrderedJson OpenAiFormatter::EchoedLogprobs(const std::vector<OutputToken>* prompt,
                                            const std::vector<OutputToken>& tokens, size_t* text_offset) const {
  if (prompt == nullptr || !head_.logprobs.has_value() || head_.echo_texts.empty())
    return Logprobs(tokens, text_offset);
  std::vector<OutputToken> all = *prompt;
  for (OutputToken& token : all) token.top.resize(std::min<size_t>(token.top.size(), *head_.logprobs));
  all.insert(all.end(), tokens.begin(), tokens.end());
  return CompletionLogprobs(all, text_offset);
}

// As vLLM has it: by token id, the prompt's token first. Ranks beyond the alternatives are not known.
OrderedJson OpenAiFormatter::PromptLogprobs(const std::vector<OutputToken>& prompt) const {
  OrderedJson list = OrderedJson::array();
  for (const OutputToken& token : prompt) {
    if (!token.has_logprob) {
      list.push_back(nullptr);
      continue;
    }
    OrderedJson entries = OrderedJson::object();
    const auto add = [&](TokenId id, float logprob) {
      const auto found = std::find_if(token.top.begin(), token.top.end(), [&](const auto& t) { return t.first == id; });
      entries[std::to_string(id)] = {
          {"logprob", JsonLogprob(logprob)},
          {"rank", found == token.top.end() ? OrderedJson(nullptr) : OrderedJson(found - token.top.begin() + 1)},
          {"decoded_token", TextOf(tokenizer_, id).text}};
    };
    add(token.id, token.logprob);
    const size_t num_top = std::min<size_t>(token.top.size(), *head_.prompt_logprobs);
    for (size_t i = 0; i < num_top; ++i) add(token.top[i].first, token.top[i].second);
    list.push_back(std::move(entries));
  }
  return list;
}

OrderedJson OpenAiFormatter::CompletionLogprobs(std::span<const OutputToken> tokens, size_t* text_offset) const {
  OrderedJson out;
  out["tokens"] = OrderedJson::array();
  out["token_logprobs"] = OrderedJson::array();
  out["top_logprobs"] = OrderedJson::array();
  out["text_offset"] = OrderedJson::array();
  for (const OutputToken& token : tokens) {
    const std::string text = TextOf(tokenizer_, token.id).text;
    OrderedJson top = OrderedJson::object();
    for (const auto& [id, logprob] : token.top) top[TextOf(tokenizer_, id).text] = JsonLogprob(logprob);
    out["tokens"].push_back(text);
    out["token_logprobs"].push_back(token.has_logprob ? OrderedJson(JsonLogprob(token.logprob)) : OrderedJson(nullptr));
    out["top_logprobs"].push_back(token.has_logprob ? std::move(top) : OrderedJson(nullptr));
    out["text_offset"].push_back(*text_offset);
    *text_offset += CountCharacters(text);
  }
  return out;
}

}  // namespace spl::router
