// A chat's answer as reasoning, content and calls, in their order.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "services/router/output_formats/registry.h"
#include "services/router/request/request.h"

namespace spl::router {

// How the answers to a request are parsed.
struct AnswerFormat {
  OutputFormat format = {};       // how reasoning and tool calls are recognized
  std::string tools_json = {};    // tools that may be called; empty: none
  bool forced = false;            // the answer consists of calls, by the grammar of ForceCalls
  bool framed = false;            // the answer is in a given form, by the grammar of FrameAnswer
  std::string call_id = "call_";  // the beginning of a call's id
};

// Makes the parsers of one request's answers. One thread at a time; borrows the tokenizer.
class AnswerParsers {
 public:
  AnswerParsers(const tokenizer::Tokenizer& tokenizer, AnswerFormat format)
      : tokenizer_(tokenizer), format_(std::move(format)) {}

  // Looks at the end of a prompt for the beginning of reasoning. Call it before Make.
  void SetPrompt(std::span<const TokenId> prompt);
  // The parser of one answer; null: all of its text is content.
  std::unique_ptr<OutputParser> Make() const;

 private:
  const tokenizer::Tokenizer& tokenizer_;
  const AnswerFormat format_;
  bool in_reasoning_ = false;  // the answer begins with reasoning
};

// A stretch of an answer that is all reasoning, all content, or one call.
struct AnswerBlock {
  enum class Kind { kReasoning, kContent, kCall };
  Kind kind = Kind::kContent;
  std::string text;      // for a call its arguments, a JSON object
  std::string id, name;  // for a call
};

// Text that was added to a block.
struct AnswerPart {
  size_t block = 0;
  bool begins = false;  // the block is new, and the one before it has ended
  std::string text;
};

// Reads one answer, fed in pieces of any size: the blocks do not depend on where the pieces end. One thread at a time;
// borrows the tokenizer.
class AnswerReader {
 public:
  AnswerReader(const tokenizer::Tokenizer& tokenizer, AnswerFormat format)
      : tokenizer_(tokenizer), parsers_(tokenizer, std::move(format)) {}

  void SetPrompt(std::span<const TokenId> prompt) { parsers_.SetPrompt(prompt); }
  std::vector<AnswerPart> Read(const Delta& delta);
  const std::vector<AnswerBlock>& blocks() const { return blocks_; }
  bool has_calls() const;
  FinishReason finish_reason() const { return finish_reason_; }    // kNone: the answer has not ended
  const std::string& stop_string() const { return stop_string_; }  // that ended it; empty: none did
  // Tokens of the reasoning's text. Cost: tokenizes it.
  uint32_t CountReasoningTokens() const;
  void Clear() { blocks_.clear(); }

 private:
  void Append(AnswerBlock::Kind kind, std::string_view text, std::vector<AnswerPart>* parts);
  void AppendCall(const ToolCallDelta& call, std::vector<AnswerPart>* parts);

  const tokenizer::Tokenizer& tokenizer_;
  AnswerParsers parsers_;
  std::unique_ptr<OutputParser> parser_;
  bool started_ = false;
  FinishReason finish_reason_ = FinishReason::kNone;
  std::string stop_string_;
  std::vector<AnswerBlock> blocks_;
};

}  // namespace spl::router
