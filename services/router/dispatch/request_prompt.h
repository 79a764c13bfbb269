// The prompt of one request in token ids, with its segments and the keys under which workers cache it.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/chunk/chunk.h"
#include "services/router/admission/auth.h"
#include "services/router/fleet/prefix_index.h"
#include "services/router/fleet/snapshot.h"
#include "services/router/request/request.h"
#include "services/router/request/served_model.h"
#include "services/router/telemetry/quality_records.h"

namespace spl::router {

struct SegmentNamespace {
  chunk::Digest key{};
  bool shared = false;  // a public namespace (wire: TokenSegment.shared)
};

struct RequestPrompt {
  std::vector<TokenId> tokens;
  std::vector<TokenSegment> segments;        // ascending and disjoint
  std::vector<SegmentNamespace> namespaces;  // [segments]
  chunk::Digest namespace_key{};             // key of the text outside segments
  PromptKeys keys;                           // empty while no worker has told its model
};

// The conversation of which the prompt is a turn, as one string (DecodeSessions). Empty: none that a decode worker
// keeps KV for, which are exact prompts without head classes whose keys are known.
std::string ConversationOf(const GenerationRequest& request, const RequestPrompt& prompt,
                           const NamespaceKeys& namespace_keys);

// Validates the request and tokenizes its prompt on the calling thread. InvalidArgument and NotFound name the field. In
// a public namespace it turns `auto_segments` off: unmarked text would become a source that has its caller's private
// text before it.
absl::StatusOr<RequestPrompt> PreparePrompt(GenerationRequest& request, const ServedModel& model,
                                            const NamespaceKeys& namespace_keys, const FleetSnapshot& fleet);

// Replaces the policy "auto" by the fleet's default if the prompt has text to reuse, and remembers that it did
// (GenerationRequest::choose_method). It must be known before KV is reserved, because a method with head classes needs
// fewer pages. The decode worker gets all KV with a contract (ReuseOptions.quality), and where `records` say that the
// default answers badly in the prompt's namespace. An exact prompt has no segment keys.
void ResolvePolicy(GenerationRequest& request, RequestPrompt& prompt, const FleetSnapshot& fleet,
                   const QualityRecords& records);

// Limits max_tokens and min_tokens to the room after the prompt. InvalidArgument: the prompt is empty or longer than
// `context`, than a prefill worker or a decode worker holds, or a token id is not below the vocabulary's size.
absl::Status CheckAndClamp(GenerationRequest& request, const RequestPrompt& prompt, const FleetSnapshot& fleet,
                           uint64_t context, uint32_t tokenizer_vocab_size);

}  // namespace spl::router
