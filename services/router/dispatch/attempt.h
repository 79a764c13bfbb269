// One try of a request on one pair of workers: a KV reservation (ticket) on the decode worker, its token stream, and
// the prefill that writes into the reservation.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "services/base/trace.h"
#include "services/router/dispatch/dispatcher.h"
#include "services/router/dispatch/request_prompt.h"
#include "services/router/fleet/workers.h"

namespace spl::router {

using ReserveCall = UnaryCall<v1::ReserveRequest, v1::Ticket>;
using PrefillCall = UnaryCall<v1::PrefillRequest, v1::PrefillResponse>;

// Plain state; its request's strand guards it.
struct Attempt {
  PrefillView prefill;
  DecodeView decode;
  PeerLink link;                              // between the two
  double expected_seconds = 0;                // until the prompt's KV is at the decode worker
  uint32_t exact_tokens = 0;                  // see PredictedReuse
  std::shared_ptr<PrefillCall> prefill_call;  // while it runs
  std::shared_ptr<TokenStream> stream;        // while it is open
  v1::Ticket ticket;
  bool reserved = false;  // the ticket has to be given back
  bool prefilled = false;
  // No prefill write to the ticket's pages can be on its way: none was asked for, the prefill worker says that it
  // failed, or decoding has begun. Prefill's answer alone does not say so: it comes before the last write has arrived.
  bool writer_quiet = true;
  absl::Status early_end;  // the stream ended before prefill answered
  bool stream_ended = false;
  std::vector<v1::StreamChunk> early;  // at most one: the next is read after prefill has answered
  PlacedLoad load;
  Span reserve_span, prefill_span, decode_span;  // spans of its calls

  // Number of answer tokens that count as prompt for these workers: all of them, or none if the decode worker replays
  // them.
  size_t NumPriorOutput(std::span<const TokenId> output) const { return decode.replays ? 0 : output.size(); }
};
using AttemptPtr = std::shared_ptr<Attempt>;

// The parts of a request that are sent to its workers. Borrowed for the call.
struct SentRequest {
  const GenerationRequest& request;
  const RequestPrompt& prompt;
  std::span<const TokenId> output;  // tokens of the answer so far
  const NamespaceKeys& namespace_keys;
};

// Fills `out`, an empty message. The ticket's time to live grows with the attempt's expected seconds.
void FillReserveRequest(const SentRequest& sent, const Attempt& attempt, const FleetSnapshot& fleet,
                        const DispatchOptions& options, v1::ReserveRequest& out);
void FillPrefillRequest(const SentRequest& sent, const Attempt& attempt, v1::PrefillRequest& out);

// Gives the ticket back, once; does nothing if there is none. Returns at once. If a prefill write may still be on its
// way, the prefill worker is asked to stop first, and the pages stay out of use until it has said so or the ticket
// ends.
void ReleaseTicket(Attempt& attempt, const char* reason, const DispatchOptions& options);

}  // namespace spl::router
