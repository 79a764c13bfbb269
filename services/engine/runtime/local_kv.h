// The KV that a prefill engine keeps for later prompts: prefixes, segments and conversations, in pages of one pool.
#pragma once

#include <cstdint>
#include <vector>

#include "services/engine/cache/prefix_index.h"
#include "services/engine/cache/segment_index.h"
#include "services/engine/cache/session_table.h"
#include "services/engine/runtime/prefill_job.h"

namespace spl::engine {

SessionId SessionOf(const PrefillRequest& request);

// Its members may be used from any thread, the functions from the engine's.
struct LocalKv {
  PrefixIndex prefixes;
  SegmentIndex segments;
  SessionTable sessions;

  // Appends the leading pages of the prompt that are here to an empty sequence: exact ones of any prompt or, where they
  // are more, those of the conversation's last turn, which become the job's session_tokens.
  void AppendLeading(PrefillJob& job, SequenceKv& kv);
  // Copies of the prompt's segments (fetched for it, or found in local pages), and of its other text where the request
  // says so. Ascending, disjoint, behind the prefix, which is exact and wins; each is long enough to be worth a copy.
  std::vector<SegmentHit> FindSegments(const PrefillJob& job);
  // The source that is this segment and nothing else; null: there is none.
  std::shared_ptr<const SegmentSource> WholeSourceOf(const PrefillJob& job, const ReuseSpan& segment);
};

}  // namespace spl::engine
