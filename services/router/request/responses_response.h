// Formats answers in the shape of OpenAI's POST /v1/responses.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "services/router/request/answer_formatter.h"
#include "services/router/request/answer_reader.h"

namespace spl::router {

// A response object, whole or as the events of a stream, each with a sequence_number:
//
//   response.created, response.in_progress
//   for each item  response.output_item.added, its deltas, its .done events, response.output_item.done
//   response.completed, .incomplete or .failed, with the whole response
//
// Items are reasoning, message and function_call, in the order in which the model wrote them. An answer without any is
// an empty message. Borrows the tokenizer.
class ResponsesFormatter final : public AnswerFormatter {
 public:
  struct Head {
    std::string id;  // 32 hexadecimal digits: the response is "resp_ID", its items are "msg_ID_0" and so on
    int64_t created = 0;
    std::string model;
    OrderedJson echo = {};  // members that repeat the request
    AnswerFormat answer_format = {};
    // Called with a response that is complete or incomplete, before anything of its end is sent. May be null.
    std::function<void(const OrderedJson& response)> on_done = nullptr;
  };

  ResponsesFormatter(const tokenizer::Tokenizer& tokenizer, Head head)
      : head_(std::move(head)), reader_(tokenizer, head_.answer_format) {}

  void SetPrompt(uint32_t num_tokens, std::span<const TokenId> prompt) override;
  std::string Events(std::span<const Delta> deltas, const FinalInfo* final) override;
  std::string ErrorEvents(const absl::Status& status) override;
  void Add(std::span<const Delta> deltas) override;
  OrderedJson Whole(const FinalInfo& final) override;
  void Clear() override { reader_.Clear(); }

 private:
  OrderedJson Response(const char* status) const;
  OrderedJson Done(const FinalInfo& final);
  bool incomplete() const { return reader_.finish_reason() == FinishReason::kLength; }
  const AnswerBlock& BlockAt(size_t index) const;
  size_t num_items() const;
  // The item as it is at the end; `status` "in_progress": as it begins.
  OrderedJson ItemJson(size_t index, std::string_view status) const;
  std::string ItemId(size_t index) const;

  std::string Event(OrderedJson event);
  OrderedJson About(const char* type, size_t index) const;
  std::string Begin(size_t index);
  std::string Extend(size_t index, const std::string& text);
  std::string End(size_t index, std::string_view status);

  const Head head_;
  AnswerReader reader_;
  uint64_t sequence_number_ = 0;
  bool started_ = false;
  size_t num_begun_ = 0;  // items, all but the last of which have ended
};

// The response to which an item of this id belongs; empty: it is no id of an item.
std::string ResponseOfItem(std::string_view item_id);

}  // namespace spl::router
