// How an API writes the answer to one request: as server-sent events, or as one JSON object.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "services/router/request/answer_json.h"
#include "services/router/request/request.h"

namespace spl::router {

// One for each response, no I/O. Calls come from one thread at a time: SetPrompt first, then either Events for a
// stream, or Add and at last Whole.
class AnswerFormatter {
 public:
  virtual ~AnswerFormatter() = default;

  // `prompt`: at least the end of the prompt, which tells whether a chat's answer begins with reasoning.
  virtual void SetPrompt(uint32_t num_tokens, std::span<const TokenId> prompt) = 0;

  // Server-sent events for some output. With `final`, also those that end the stream.
  virtual std::string Events(std::span<const Delta> deltas, const FinalInfo* final) = 0;
  // The events that end a stream whose request failed after the first event.
  virtual std::string ErrorEvents(const absl::Status& status) = 0;

  // Collects output; Whole formats the response from everything that was added.
  virtual void Add(std::span<const Delta> deltas) = 0;
  virtual OrderedJson Whole(const FinalInfo& final) = 0;
  // Drops everything that was added: no Whole follows.
  virtual void Clear() = 0;
};

}  // namespace spl::router
