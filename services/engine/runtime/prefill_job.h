// One prompt in a prefill engine, from Submit or Publish to its last callback.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "services/engine/cache/segment_index.h"
#include "services/engine/model/model.h"
#include "services/engine/recovery/recovery_policy.h"
#include "services/engine/runtime/prefill_request.h"
#include "services/engine/runtime/prompt_fetch.h"
#include "services/engine/runtime/prompt_run.h"
#include "services/engine/runtime/segment_fetcher.h"

namespace spl::engine {

struct LocalKv;  // local_kv.h

// Shortest copy that is used (docs/segments.md). A shorter one costs more than it saves, because its edges are
// recomputed anyway.
inline constexpr int32_t kSegmentTokensMin = 32;

// The engine's thread owns it. One that fetches for it reads what no longer changes: text, keys, deadline, PromptFetch.
struct PrefillJob {
  using Clock = std::chrono::steady_clock;

  PrefillRequest request;
  std::optional<PublishRequest> publish;  // set for a Publish call: `request` has its tokens and segments
  std::vector<chunk::ChunkKey> keys;      // full chunks that may be reused or published
  std::vector<std::vector<chunk::ChunkKey>> segment_keys;  // for request.segments, if the store is asked for them
  std::shared_ptr<RecoveryPolicy> policy;                  // another one once there is a choice (ChooseMethodOf)
  std::shared_ptr<PromptFetch> fetch;  // null: the store is not asked; shared with a thread that fetches
  FetchedSegments fetched;             // what came in time; indices are those of request.segments
  std::shared_ptr<SequenceKv> kv;
  PrefillStats stats;
  std::vector<SampledToken> first_tokens;
  std::vector<float> first_logits;
  std::vector<TokenLogprob> prompt_logprobs;  // [tokens - 1], if the request asks for them
  std::vector<int32_t> restored_heads;
  std::shared_ptr<const KeptTokens> kept;  // null: everything
  PositionRanges only;                     // empty: everything
  PositionRanges foreign_copies;           // PromptRun::foreign_copies
  Clock::time_point submitted = Clock::now();
  Clock::time_point started{};
  double run_lookup_s = 0;         // part of lookup_s after `started`
  std::unique_ptr<PromptRun> run;  // made shortly before the first pass
  bool met = false;                // its fetch has ended, or was given up
  int64_t queued = 0;              // its part of PrefillMeter's queued tokens

  // Tokens that still have to be computed.
  double remaining() const {
    return run ? run->remaining_work() : static_cast<double>(request.tokens.size()) - static_cast<double>(cached());
  }
  int64_t cached() const { return kv ? kv->num_tokens() : 0; }
  bool cancelled() const { return request.cancelled->load(std::memory_order_relaxed); }
  bool low_priority() const { return publish.has_value() || request.background; }  // no client waits for an answer
  std::span<const int32_t> text_of(const PositionRange& range) const {
    return std::span(request.tokens).subspan(range.begin, range.size());
  }
  // Keys of chunks that may be reused. The last prompt position is always computed: its logits give the first token.
  // So is every position whose logits the request asks for.
  std::span<const chunk::ChunkKey> reusable_keys() const {
    if (request.prompt_logprobs.has_value()) return {};
    const auto most = std::min<uint64_t>(request.tokens.size() - 1, static_cast<uint64_t>(request.max_cached_tokens));
    return std::span(keys).first(std::min<size_t>(keys.size(), most / kernels::kPageTokens));
  }
  // Parts of `within` that are in no segment of the request.
  PositionRanges UnmarkedText(PositionRange within) const;
  // Whether its start may still arrive from the store while it runs.
  bool overlaps() const { return fetch != nullptr && fetch->overlaps && !met; }
  bool ExpectsMore(Clock::time_point now) const { return overlaps() && fetch->SecondsLeft(now) > 0; }
  // Leading chunks that the store is known to have.
  size_t num_stored_chunks() const;

  // Called when the prompt has its pages and everything that it waited for.
  void Begin();
  // Finds and copies segments. Announces the cached pages before it copies, and then copies that are final.
  // ResourceExhausted: the request does not allow to compute so many tokens.
  absl::Status StartRun(LocalKv& local, ParallelExecutor& executor);
  // Called when the prompt need not wait for the store any longer: takes what has come. The start of a prompt that
  // overlaps its fetch may go on arriving.
  void TakeFetched(Clock::time_point now);
  // Rows that the next slice may have, of `room`, so that it computes nothing that has arrived. If what was computed
  // and what has arrived meet, skips the latter. Announces pages that have arrived. For a prompt that overlaps() its
  // fetch, whose run has started.
  int32_t MeetFetch(int32_t room);
  // Called once at the end: nothing arrives any more, and the statistics say what the store was used for.
  void EndFetch();
  // PromptRun::Next. `kept` is known from the first slice on, before any page is final.
  PrefillSlice NextSlice(int32_t room);
  // Called when the pass that NextSlice described is complete. Announces pages that are final from now on.
  absl::Status FinishPass(ParallelExecutor& executor);
  // Announces that K and V of `layer` are written, for all rows of the pass.
  void AnnounceLayer(int32_t layer, const std::shared_ptr<const kernels::Fence>& fence);
  // Takes over the results of the run, which is done.
  void EndRun();
  PrefillOutcome TakeOutcome(bool ok);

 private:
  // Announces pages that are final before the next pass. With an executor they are so when it has done what it was
  // given.
  absl::Status AnnounceFinal(ParallelExecutor* executor);
  void NoteKept();
};

// Checks the request and chooses its policy. `segments` identifies segments by their chunks' keys. `max_tokens`:
// capacity of the pool. InvalidArgument: the prompt (with both numbers if it is too long), a sampling field, a reuse
// option.
absl::StatusOr<std::shared_ptr<PrefillJob>> MakeJob(PrefillRequest request, const Model& model, int64_t max_tokens,
                                                    const SegmentIndex& segments, bool has_store);
// The same for a context to publish: its policy is exact, and records the summaries of segments. InvalidArgument: no
// segments.
absl::StatusOr<std::shared_ptr<PrefillJob>> MakeJob(PublishRequest request, const Model& model, int64_t max_tokens);

}  // namespace spl::engine
