// Formats answers in the shape of Anthropic's POST /v1/messages.
#pragma once

#include <string>
#include <vector>

#include "services/router/request/answer_formatter.h"
#include "services/router/request/answer_reader.h"

namespace spl::router {

// A message, whole or as the events of a stream:
//
//   message_start, ping
//   for each block  content_block_start, content_block_delta …, content_block_stop
//   message_delta   with stop_reason, usage and the receipt ("splice")
//   message_stop    or, after a failure, error
//
// Blocks are thinking, text and tool_use, in the order in which the model wrote them. Borrows the tokenizer.
class MessagesFormatter final : public AnswerFormatter {
 public:
  struct Head {
    std::string id;  // "msg_…"
    std::string model;
    std::string request_id;  // for errors
    AnswerFormat answer_format = {};
  };

  MessagesFormatter(const tokenizer::Tokenizer& tokenizer, Head head)
      : head_(std::move(head)), reader_(tokenizer, head_.answer_format) {}

  void SetPrompt(uint32_t num_tokens, std::span<const TokenId> prompt) override;
  std::string Events(std::span<const Delta> deltas, const FinalInfo* final) override;
  std::string ErrorEvents(const absl::Status& status) override;
  void Add(std::span<const Delta> deltas) override;
  OrderedJson Whole(const FinalInfo& final) override;
  void Clear() override { reader_.Clear(); }

 private:
  OrderedJson Message() const;
  std::string Start();
  std::string PartEvents(const AnswerPart& part);
  std::string StopBlock();
  void SetEnd(OrderedJson* message) const;

  const Head head_;
  AnswerReader reader_;
  uint32_t prompt_tokens_ = 0;
  bool started_ = false;
  size_t num_open_ = 0;  // blocks that have begun, all but the last of which have ended
};

}  // namespace spl::router
