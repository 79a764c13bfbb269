// Measures how TTFT grows from turn to turn of a conversation: with its KV kept between turns, and with every turn as a
// prompt of its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tools/cli/text_generator.h"

namespace spl::cli {

struct ConversationOptions {
  int32_t turns = 10;
  int32_t first_tokens = 1024;  // tokens of the first turn
  int32_t turn_tokens = 128;    // new tokens of each later turn
  int32_t answer_tokens = 16;
  int32_t conversations = 1;      // run one after the other; times are their medians
  std::vector<int32_t> alphabet;  // token ids that texts are drawn from
  uint64_t seed = 1;
  // Prefill and decode method of the conversation, as "REUSE" or "REUSE/DECODE".
  std::vector<std::string> methods = {"exact"};
  // Looked at before every turn: once it is true the measurement ends with the turns that it has. Null: it runs to its
  // end. Borrowed.
  const std::atomic<bool>* stop = nullptr;

  bool stopped() const { return stop != nullptr && stop->load(); }
};

struct ConversationTurn {
  std::string method;  // "alone": each turn by itself, exact, without kept KV
  int32_t turn = 0;    // from 1
  int64_t prompt_tokens = 0, cached_tokens = 0, computed_tokens = 0;
  int64_t held_tokens = 0;              // tokens that were not sent, because the decode worker had kept their KV
  int64_t moved_bytes = 0;              // KV sent from the prefill to the decode worker
  double ttft_s = 0, tokens_per_s = 0;  // medians over the conversations
};

// Measures method by method, turn by turn, on one server. The texts are the same for all methods; each has its own
// answers.
absl::StatusOr<std::vector<ConversationTurn>> MeasureConversations(
    TextGenerator& generator, const ConversationOptions& options,
    const std::function<void(const std::string& method, int32_t conversation, int32_t turn)>& progress);

std::string ConversationText(const std::vector<ConversationTurn>& turns);
nlohmann::ordered_json ConversationJson(const std::vector<ConversationTurn>& turns, const ConversationOptions& options);
// HTML page with a plot of TTFT over the turns, a line for each method.
std::string ConversationPage(const std::vector<ConversationTurn>& turns);

}  // namespace spl::cli
