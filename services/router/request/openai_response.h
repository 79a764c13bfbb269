// Results → OpenAI-shaped JSON. Pure formatting; one object per response.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "services/router/request/request.h"

namespace spl::router {

using OrderedJson = nlohmann::ordered_json;

// JSON text; bytes that are not UTF-8 become U+FFFD instead of an exception.
std::string Dump(const OrderedJson& json);

// "data: {...}\n\n"
std::string SseEvent(const OrderedJson& json);
inline constexpr char kSseDone[] = "data: [DONE]\n\n";

OrderedJson UsageJson(const FinalInfo& final);
// A v1.Receipt, for "splice", by its declaration: each field at its path, but for messages and optional fields that are
// not set, and empty maps.
OrderedJson ReceiptJson(const google::protobuf::Message& receipt);

// A token as text, and as the bytes it stands for (which may be part of a character).
struct TokenText {
  std::string text;
  std::vector<uint8_t> bytes;
};
TokenText TextOf(const tokenizer::Tokenizer& tokenizer, TokenId id);

// Formats one response to /v1/chat/completions or /v1/completions, whole or in pieces. One thread at a time; borrows
// the tokenizer.
class OpenAiFormatter {
 public:
  struct Head {
    bool chat = true;
    std::string id;  // "chatcmpl-…" or "cmpl-…"
    int64_t created = 0;
    std::string model;
    bool logprobs = false;       // the request asked for them
    bool include_usage = false;  // of a stream
    std::string echo_text;       // goes before the text of every continuation
  };

  OpenAiFormatter(const tokenizer::Tokenizer& tokenizer, Head head) : tokenizer_(tokenizer), head_(std::move(head)) {}

  // Server-sent events for some output; with `final`, also the usage chunk and the end mark.
  std::string Events(std::span<const Delta> deltas, const FinalInfo* final);

  // The whole response, from everything added.
  void Add(std::span<const Delta> deltas);
  OrderedJson Whole(const FinalInfo& final) const;
  void Clear() { by_index_.clear(); }  // of everything added

 private:
  struct Collected {
    std::string text;
    std::vector<OutputToken> tokens;
    FinishReason finish_reason = FinishReason::kNone;
    bool started = false;
    size_t text_offset = 0;  // characters of the tokens so far
  };

  OrderedJson Envelope(const char* object) const;
  OrderedJson Chunk(uint32_t index, OrderedJson content, OrderedJson logprobs, FinishReason reason) const;
  OrderedJson Logprobs(const std::vector<OutputToken>& tokens, size_t* text_offset) const;
  OrderedJson ChatLogprobs(const std::vector<OutputToken>& tokens) const;
  OrderedJson CompletionLogprobs(const std::vector<OutputToken>& tokens, size_t* text_offset) const;

  const tokenizer::Tokenizer& tokenizer_;
  const Head head_;
  std::map<uint32_t, Collected> by_index_;
};

}  // namespace spl::router
