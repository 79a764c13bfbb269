// One sequence of a decode engine and its continuations, with everything they own, from submission to end.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/engine/cache/compact_pages.h"
#include "services/engine/cache/hot_buffer.h"
#include "services/engine/cache/sequence_kv.h"
#include "services/engine/model/model.h"
#include "services/engine/runtime/decode_fidelity.h"
#include "services/engine/runtime/decode_request.h"
#include "services/engine/runtime/mass_guard.h"
#include "services/engine/runtime/parked_pages.h"
#include "services/engine/runtime/prompt_replay.h"
#include "services/engine/runtime/sampler.h"
#include "services/engine/runtime/token_delivery.h"
#include "services/engine/selection/token_selector.h"

namespace spl::engine {

// One continuation: a row in every step until it has finished. Owns its share of the sequence's pages.
struct DecodeFork {
  int32_t index = 0;
  std::unique_ptr<SequenceKv> kv;  // null once finished
  std::unique_ptr<TokenSelector> selector;
  std::unique_ptr<CompactPages> compact;  // null: the selector needs none
  std::unique_ptr<HotBuffer> hot;         // null: all of its pages are in the pool
  int64_t next_move = 0;                  // HostTier does not look at it before it has so many positions
  std::unique_ptr<Sampler> sampler;
  std::unique_ptr<MassGuard> guard;          // null: no floor for what chosen tokens hold
  std::unique_ptr<WatchedSequence> watched;  // null: not compared with an exact step
  bool stopped_choosing = false;             // attends to everything, because the pool had no room for its choice
  int32_t last_token = 0;
  std::deque<int32_t> replay;  // next tokens, whatever is drawn; the client has them already
  int64_t num_output = 1;      // tokens of this request, including the first one
  bool finished = false;
  // Rows of it in running steps whose tokens have not been taken yet (DecodeStep::under_way), 0 or 1; then the row's
  // index. Its pages are not given back meanwhile: the device writes to them.
  int32_t in_flight = 0;
  int32_t flight_row = 0;

  // Whether the token in flight is the last one.
  bool EndsInFlight() const { return in_flight > 0 && sampler->EndsWithin(in_flight); }
  // Positions that it has after the tokens in flight are taken.
  int64_t num_positions() const { return kv->num_tokens() + in_flight; }
  // Most pages of each rank that Grow takes, with so many streams a rank.
  int64_t GrowthPages(int64_t streams) const;
  // Takes room for the next position. ResourceExhausted: no pages are free.
  absl::Status Grow();
  // Gives back the pages. REQUIRES: none of its rows is in flight.
  void Free();
};

// Made by Make on any thread; afterwards it belongs to the engine thread.
struct DecodeSequence {
  // Checks the request and derives the properties of its selector. InvalidArgument: a field out of range, named with
  // its value; a token outside the vocabulary; more continuations than the `max_rows` rows of a step.
  static absl::StatusOr<std::unique_ptr<DecodeSequence>> Make(DecodeRequest request, const Model& model,
                                                              int32_t max_rows);

  DecodeRequest request;                     // without the callbacks, which the listener has
  std::unique_ptr<DecodeListener> listener;  // null once the sequence has ended
  uint64_t order = 0;                        // order of arrival
  std::vector<DecodeFork> forks;             // empty before it has started
  std::unique_ptr<ParkedPages> parked;       // null: its pages are in the pool
  // Properties of its selector, constant for its whole life.
  bool chooses_by_prompt = false;          // before it starts (PromptSelector), unless there is nothing to decode
  bool gathers_keys = false;               // in its first step
  bool steps_are_alone = true;             // a step's attention does not depend on the steps before it
  std::unique_ptr<TokenSelector> chooser;  // for a choice in progress
  std::unique_ptr<PromptChoice> choice;    // refers to it and to request.kv
  std::optional<PromptKept> of_prompt;     // chosen by its selector, the same for every fork
  bool done = false;

  // Gives back the pages of an unfinished choice. The choice starts again later.
  void DropChoice();
  // Gives back the pages of a continuation, after on_pages_back. REQUIRES: none of its rows is in flight.
  void Free(DecodeFork& fork);
  // Gives back all pages and then reports the end, so that the listener finds them free. Once.
  void End(const absl::Status& status, TokenDelivery& delivery);

  bool has_to_choose() const { return chooses_by_prompt && !of_prompt.has_value(); }
  // Whether several tokens to replay are left that can share a step.
  bool has_to_replay() const { return request.replay.size() > 1 && steps_are_alone; }
  // Positions whose keys the first step gathers.
  int64_t gathered_tokens() const { return gathers_keys ? request.kv->num_tokens() : 0; }
  const std::vector<int32_t>& tokens() const {
    return request.left_prompt.empty() ? request.prompt : request.left_prompt;
  }
  bool started() const { return !forks.empty(); }
  bool runs() const { return !done && parked == nullptr; }
  PageHolders Holders() const;
  void OfferPages(const SequenceKv* kv);  // calls on_pages_back; `kv` may be null
  // Number of continuations that take part in a step.
  size_t num_rows() const { return started() ? num_active() : static_cast<size_t>(request.sampling.num_forks); }

  bool cancelled() const { return request.cancelled->load(std::memory_order_relaxed); }
  bool in_flight() const {
    return std::any_of(forks.begin(), forks.end(), [](const DecodeFork& f) { return f.in_flight > 0; });
  }
  size_t num_active() const {
    return static_cast<size_t>(
        std::count_if(forks.begin(), forks.end(), [](const DecodeFork& f) { return !f.finished; }));
  }
};

}  // namespace spl::engine
