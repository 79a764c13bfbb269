// Formats results as OpenAI-shaped JSON. No I/O; one object for each response.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "services/router/request/answer_formatter.h"
#include "services/router/request/answer_json.h"
#include "services/router/request/answer_reader.h"
#include "services/router/request/request.h"

namespace spl::router {

// A token as text, and as its bytes, which may be part of a character.
struct TokenText {
  std::string text;
  std::vector<uint8_t> bytes;
};
TokenText TextOf(const tokenizer::Tokenizer& tokenizer, TokenId id);

inline constexpr char kSseDone[] = "data: [DONE]\n\n";

// Formats one response to /v1/chat/completions or /v1/completions. Borrows the tokenizer.
class OpenAiFormatter final : public AnswerFormatter {
 public:
  struct Head {
    bool chat = true;
    std::string id;  // "chatcmpl-…" or "cmpl-…"
    int64_t created = 0;
    std::string model;
    std::optional<uint32_t> logprobs = {};         // alternatives of each token; unset: not asked for
    std::optional<uint32_t> prompt_logprobs = {};  // the same in "prompt_logprobs"
    bool include_usage = false;                    // only for a stream
    bool continuous_usage = false;                 // every event of a stream has the usage so far
    std::vector<std::string> echo_texts = {};      // [prompt]: put before the text of its continuations; may be empty
    uint32_t num_continuations = 1;                // for each prompt
    AnswerFormat answer_format = {};               // for a chat
  };

  OpenAiFormatter(const tokenizer::Tokenizer& tokenizer, Head head)
      : tokenizer_(tokenizer), head_(std::move(head)), parsers_(tokenizer, head_.answer_format) {}

  void SetPrompt(uint32_t num_tokens, std::span<const TokenId> prompt) override;
  std::string Events(std::span<const Delta> deltas, const FinalInfo* final) override;
  std::string ErrorEvents(const absl::Status& status) override;
  void Add(std::span<const Delta> deltas) override;
  OrderedJson Whole(const FinalInfo& final) override;
  void Clear() override { by_index_.clear(); }

 private:
  struct Collected {
    std::string text;
    std::vector<OutputToken> tokens;
    std::shared_ptr<const std::vector<OutputToken>> prompt;  // null: its log-probabilities were not asked for
    FinishReason finish_reason = FinishReason::kNone;
    bool started = false;
    size_t text_offset = 0;                // characters of the tokens so far
    std::unique_ptr<OutputParser> parser;  // only for a stream; null: all text is content
    bool has_calls = false;
  };

  OrderedJson Envelope(const char* object) const;
  OrderedJson UsageSoFar() const;
  std::string EchoText(uint32_t index) const;
  OrderedJson Chunk(uint32_t index, OrderedJson content, OrderedJson logprobs, const char* finish_reason) const;
  std::string ChatEvents(Collected& state, const Delta& delta, OrderedJson logprobs) const;
  OrderedJson Message(const Collected& state, bool* has_calls) const;
  OrderedJson Logprobs(const std::vector<OutputToken>& tokens, size_t* text_offset) const;
  OrderedJson ChatLogprobs(const std::vector<OutputToken>& tokens) const;
  OrderedJson CompletionLogprobs(std::span<const OutputToken> tokens, size_t* text_offset) const;
  // The same with those of an echoed prompt in front; `prompt` may be null.
  OrderedJson EchoedLogprobs(const std::vector<OutputToken>* prompt, const std::vector<OutputToken>& tokens,
                             size_t* text_offset) const;
  OrderedJson PromptLogprobs(const std::vector<OutputToken>& prompt) const;

  const tokenizer::Tokenizer& tokenizer_;
  const Head head_;
  AnswerParsers parsers_;
  std::map<uint32_t, Collected> by_index_;
  uint32_t prompt_tokens_ = 0;
  uint32_t completion_tokens_ = 0;  // in the events so far
};

}  // namespace spl::router
