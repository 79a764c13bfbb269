// The KV that a prefill engine caches for later prompts: prefixes, segments and conversations, in pages of one pool.
#pragma once

#include <cstdint>
#include <vector>

#include "services/engine/cache/prefix_index.h"
#include "services/engine/cache/segment_index.h"
#include "services/engine/cache/session_table.h"
#include "services/engine/runtime/prefill_job.h"

namespace spl::engine {

SessionId SessionOf(const PrefillRequest& request);

// Its members may be used from any thread, its functions only from the engine's.
struct LocalKv {
  PrefixIndex prefixes;
  SegmentIndex segments;
  SessionTable sessions;

  // Appends cached leading pages of the prompt to an empty sequence: exact ones of any prompt. If the last turn of the
  // conversation has more, those are appended instead and become the job's session_tokens.
  void AppendLeading(PrefillJob& job, SequenceKv& kv);
  // Finds copies of the prompt's segments (fetched for it, or in local pages), and of its other text if the request
  // asks for that. Ascending, disjoint, after the prefix, which is exact and takes precedence. Each is long enough to
  // be worth a copy.
  std::vector<SegmentHit> FindSegments(const PrefillJob& job);
  // The source that consists of exactly this segment; null: there is none.
  std::shared_ptr<const SegmentSource> WholeSourceOf(const PrefillJob& job, const ReuseSpan& segment);
};

}  // namespace spl::engine
