// A client's request as plain values. Both front doors (HTTP and gRPC) hand it to the dispatch core in this form, and
// the core returns results in this form.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "services/base/trace.h"
#include "services/grammar/token_grammar.h"
#include "services/methods/methods.h"
#include "services/router/request/segment_marks.h"
#include "services/tokenizer/chat_template.h"
#include "services/tokenizer/tokenizer.h"
#include "spl/v1/common.pb.h"

namespace spl::router {

using tokenizer::TokenId;

// Names and meanings of vLLM's SamplingParams; see proto/spl/v1/common.proto for each field.
struct Sampling {
  std::optional<uint32_t> max_tokens;
  uint32_t min_tokens = 0;
  float temperature = 1.0F;
  uint32_t top_k = 0;  // 0 keeps all
  float top_p = 1.0F;
  float min_p = 0.0F;
  float repetition_penalty = 1.0F;
  float presence_penalty = 0.0F;
  float frequency_penalty = 0.0F;
  std::optional<uint64_t> seed;
  std::map<uint32_t, float> logit_bias;
  std::vector<uint32_t> stop_token_ids;
  bool ignore_eos = false;
  uint32_t n = 1;
  std::optional<uint32_t> logprobs;
  std::optional<grammar::GrammarSpec> structured_output;  // unset: any text
  std::string structured_field;                           // that asked for it, for errors

  // True if a penalty needs the prompt's tokens on the decode side.
  bool HasPenalty() const {
    return repetition_penalty != 1.0F || presence_penalty != 0.0F || frequency_penalty != 0.0F;
  }
};

// Upper bounds of a request's fields: they limit the memory that one request can hold.
inline constexpr uint32_t kMaxContinuations = 64;
inline constexpr uint32_t kMaxTopLogprobs = 20;
inline constexpr size_t kMaxStopStrings = 16;
inline constexpr size_t kMaxStopBytes = 1024;
inline constexpr size_t kMaxStopTokenIds = 1024;
inline constexpr size_t kMaxLogitBias = 1024;
inline constexpr size_t kMaxNameBytes = 256;
inline constexpr size_t kMaxSegments = 4096;
inline constexpr int32_t kMaxPriority = 1000;  // and not below -kMaxPriority

struct ChatPrompt {
  std::vector<tokenizer::ChatMessage> messages;  // marks stand for segments
  bool add_generation_prompt = true;
  bool continue_final_message = false;
  // A JSON object of further template variables (tools, documents, enable_thinking, …), and their names. Empty: none.
  std::string variables_json = {};
  std::vector<std::string> variable_names = {};
  SegmentMarks segments = {};
};

// Text with marks for its segments.
struct SegmentedText {
  std::string text;
  SegmentMarks segments;
};

// Tokens [begin, end) of a prompt that are a segment.
struct TokenSegment {
  uint32_t begin = 0, end = 0;
  std::string namespace_name;       // empty: the request's own
  std::string knowledge_base = {};  // see PromptSegment
  std::string namespace_key = {};
  bool frozen = false;
};

// Token ids, and their segments: ascending and disjoint.
struct TokenizedPrompt {
  std::vector<TokenId> ids;
  std::vector<TokenSegment> segments;
};

using Prompt = std::variant<std::string, ChatPrompt, std::vector<TokenId>, SegmentedText, TokenizedPrompt>;

// Whether the decode method runs the prompt's last tokens once more. The decode worker then gets the prompt.
inline bool DecodeReadsPrompt(const v1::ReuseOptions& reuse) {
  const methods::Selector* const selector = methods::FindSelector(reuse.decode());
  return selector != nullptr && selector->reads_prompt;
}
inline bool Publishes(const v1::ReuseOptions& reuse) { return !reuse.has_publish() || reuse.publish(); }

// Limits of one API key; 0: no limit.
struct CallerLimits {
  uint32_t requests_per_minute = 0;
  uint32_t tokens_per_minute = 0;  // prompt and output
  uint32_t max_concurrent = 0;
  bool any() const { return requests_per_minute > 0 || tokens_per_minute > 0 || max_concurrent > 0; }
};

// Identity of the client. Two callers never share cached KV unless they are the same identity, or the namespace is
// public (docs/segments.md).
struct Caller {
  std::string name;    // for logs; never the key itself
  std::string secret;  // the API key; empty when the router runs without keys
  double weight = 1;   // share in the queue, relative to other callers
  CallerLimits limits = {};
  bool is_operator = false;  // may see and end requests of all callers, and drain workers
  bool is_admin = false;     // may manage its own knowledge bases and namespaces from anywhere
};

struct GenerationRequest {
  // When the whole request had arrived. Unset: when its Generation is made.
  std::chrono::steady_clock::time_point received{};
  // Span of the request, and the client's span above it (Dispatcher::BeginTrace).
  TraceContext trace, parent_trace;
  std::string request_id;
  std::string api;  // "chat", "completions", "messages", "responses" or "grpc"; for the log line
  std::string model;
  Caller caller;
  Prompt prompt;
  bool add_special_tokens = true;  // for a text prompt: adds the begin token, as the model's tokenizer does
  Sampling sampling;
  std::vector<std::string> stop;
  bool echo = false;
  // Log-probabilities of the prompt's tokens with so many alternatives; unset: none. The prompt is computed as a whole.
  std::optional<uint32_t> prompt_logprobs;
  bool skip_special_tokens = true;
  v1::ReuseOptions reuse;      // the router reads a few of its fields and carries the others
  bool choose_method = false;  // it named no method: the prefill worker may run another one than reuse.policy
  std::string namespace_name;
  int32_t priority = 0;  // among the caller's own requests; lower goes first
  std::string session;   // the conversation that this is a turn of; empty: none
  std::map<std::string, uint64_t>
      knowledge_bases;  // that the prompt names, with versions; set by KnowledgeBases::Resolve
  std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max();
};

// Checks that a segment has either a text or a document of a knowledge base, and belongs to either a namespace or a
// knowledge base. InvalidArgument names the field below `segment.field`.
absl::Status CheckSource(const PromptSegment& segment, bool has_text);

// Asks for log-probabilities of the prompt with `num_top` alternatives (unset: for none), and for at least as many as
// the answer has if the prompt is echoed beside them. Call after `echo` and `sampling` are set.
void AskPromptLogprobs(std::optional<uint32_t> num_top, GenerationRequest& request);

// Checks ranges and lengths of everything that does not need the model. InvalidArgument names the field (ParamOf).
absl::Status ValidateRequest(const GenerationRequest& request);

enum class FinishReason { kNone, kStop, kLength, kCancelled, kError };
const char* FinishReasonName(FinishReason reason);  // OpenAI's words: "stop", "length", …

struct OutputToken {
  TokenId id = 0;
  bool has_logprob = false;
  float logprob = 0.0F;
  std::vector<std::pair<TokenId, float>> top;
};

// The next piece of one continuation. It has only tokens whose text has been released: a token whose text could still
// become part of a stop string waits.
struct Delta {
  uint32_t index = 0;
  std::string text;
  std::vector<OutputToken> tokens;
  FinishReason finish_reason = FinishReason::kNone;
  // The prompt's tokens with their log-probabilities, which the first one does not have; with a continuation's first
  // delta. Null: they were not asked for, or came before.
  std::shared_ptr<const std::vector<OutputToken>> prompt = nullptr;
  std::string stop_string = {};  // that ended the continuation; empty: none did
};

struct FinalInfo {
  uint32_t prompt_tokens = 0;
  uint32_t completion_tokens = 0;  // over all continuations
  v1::Receipt receipt;
  std::vector<v1::Receipt> more_receipts = {};  // those of the other prompts, if there are several
};

// Receives one request's output. Called from one thread at a time, in order; the calls return quickly and never block.
class GenerationSink {
 public:
  virtual ~GenerationSink() = default;
  // The prompt's tokens, and their number; called before the first output. With several prompts the number is the sum
  // over all that are known.
  virtual void OnPrompt(uint32_t /*num_tokens*/, std::span<const TokenId> /*prompt*/) {}
  // `final` is set with the last call of a successful request. To ask for a pause, return false: no further output is
  // fetched until Generation::Resume.
  virtual bool OnOutput(std::span<const Delta> deltas, const FinalInfo* final) = 0;
  // The request ended without success, before or after some output. No call follows.
  virtual void OnError(const absl::Status& status) = 0;
};

}  // namespace spl::router
