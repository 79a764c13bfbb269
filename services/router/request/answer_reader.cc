#include "services/router/request/answer_reader.h"

#include <algorithm>
#include <utility>

#include "services/base/ids.h"
#include "services/router/output_formats/framed_answers.h"

namespace spl::router {
namespace {

constexpr size_t kReasoningTokens = 16;  // at the end of a prompt, in which <think> may be spelt

}  // namespace

void AnswerParsers::SetPrompt(std::span<const TokenId> prompt) {
  if (format_.format.reasoning == "none") return;
  const auto end = prompt.last(std::min<size_t>(prompt.size(), kReasoningTokens));
  in_reasoning_ = EndsInReasoning(format_.format, tokenizer_.Decode(end, {.skip_special_tokens = false}).value_or(""));
}

std::unique_ptr<OutputParser> AnswerParsers::Make() const {
  if (format_.framed) return MakeFramedParser(format_.format, in_reasoning_);
  const CallableTools tools{.json = format_.tools_json,
                            .make_id = [prefix = format_.call_id] { return prefix + RandomId::Make().ToHex(); },
                            .forced = format_.forced};
  return MakeOutputParser(format_.format, tools.json.empty() ? nullptr : &tools, in_reasoning_);
}

std::vector<AnswerPart> AnswerReader::Read(const Delta& delta) {
  const bool ends = delta.finish_reason != FinishReason::kNone;
  if (ends) {
    finish_reason_ = delta.finish_reason;
    stop_string_ = delta.stop_string;
  }
  if (!std::exchange(started_, true)) parser_ = parsers_.Make();
  OutputDelta added;
  if (parser_ == nullptr) {
    added.content = delta.text;
  } else {
    parser_->Feed(delta.text, &added);
    if (ends) parser_->Finish(&added);
  }
  std::vector<AnswerPart> parts;
  Append(AnswerBlock::Kind::kReasoning, added.reasoning, &parts);
  const std::string_view content = added.content;
  size_t begin = 0;
  for (const ToolCallDelta& call : added.tool_calls) {
    Append(AnswerBlock::Kind::kContent, content.substr(begin, call.content_bytes - begin), &parts);
    begin = call.content_bytes;
    AppendCall(call, &parts);
  }
  Append(AnswerBlock::Kind::kContent, content.substr(begin), &parts);
  return parts;
}

void AnswerReader::Append(AnswerBlock::Kind kind, std::string_view text, std::vector<AnswerPart>* parts) {
  if (text.empty()) return;
  const bool begins = blocks_.empty() || blocks_.back().kind != kind;
  if (begins) blocks_.push_back({.kind = kind});
  blocks_.back().text += text;
  parts->push_back({.block = blocks_.size() - 1, .begins = begins, .text = std::string(text)});
}

// The first part of a call has its id; those that follow go on with its arguments.
void AnswerReader::AppendCall(const ToolCallDelta& call, std::vector<AnswerPart>* parts) {
  const bool begins = !call.id.empty();
  if (begins) blocks_.push_back({.kind = AnswerBlock::Kind::kCall, .id = call.id, .name = call.name});
  blocks_.back().text += call.arguments;
  parts->push_back({.block = blocks_.size() - 1, .begins = begins, .text = call.arguments});
}

bool AnswerReader::has_calls() const {
  return std::any_of(blocks_.begin(), blocks_.end(),
                     [](const AnswerBlock& block) { return block.kind == AnswerBlock::Kind::kCall; });
}

uint32_t AnswerReader::CountReasoningTokens() const {
  size_t count = 0;
  for (const AnswerBlock& block : blocks_) {
    if (block.kind != AnswerBlock::Kind::kReasoning) continue;
    const auto tokens = tokenizer_.Encode(block.text, {.parse_special_tokens = false});
    if (tokens.ok()) count += tokens->size();
  }
  return static_cast<uint32_t>(count);
}

}  // namespace spl::router
