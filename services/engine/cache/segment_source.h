// Tokens whose KV is in pages and may be copied elsewhere. Segment lookups find these.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "services/engine/cache/copy_context.h"
#include "services/engine/cache/page_pool.h"
#include "services/engine/cache/sequence_kv.h"

namespace spl::engine {

struct SegmentSummary;  // segment_summary.h

// Is an owner of the pages that hold positions [begin, begin + tokens.size()) of some sequence. Immutable; any thread.
// Only KV that was exact where it was computed may be a source (docs/methods/provenance.md, P3): the constructor aborts
// otherwise. Recovered KV therefore stays with its request.
class SegmentSource {
 public:
  // Shares pages of `kv`.
  SegmentSource(const SequenceKv& kv, int32_t begin, std::span<const int32_t> tokens, const SourceContext& context);
  // Takes over pages [stream][page] with one owner each, which hold the tokens from slot 0 on: chunks of a store, which
  // only takes exact KV. `begin`: the position at which tokens[0] was computed. `whole` false: some of the tokens'
  // pages hold zeros instead of KV; the caller knows which.
  SegmentSource(PagePool& pool, std::vector<std::vector<int32_t>> pages, int32_t begin, std::span<const int32_t> tokens,
                const SourceContext& context, bool whole = true);
  ~SegmentSource();
  SegmentSource(const SegmentSource&) = delete;
  SegmentSource& operator=(const SegmentSource&) = delete;

  std::span<const int32_t> tokens() const { return tokens_; }
  int32_t begin() const { return begin_; }  // position at which tokens()[0] was computed
  const SourceContext& context() const { return context_; }
  bool isolated() const { return context_.isolated; }
  // Nothing was in front of it but at most kLeadTokensMax tokens of instructions.
  bool began_prompt() const {
    return context_.isolated || (context_.front.known() && begin_ == static_cast<int32_t>(context_.front.lead));
  }
  bool is_whole() const { return whole_; }
  // Pages of a stream, [layer][kv_head]; and the place among them, and the slot, of the source's token `offset`.
  std::span<const int32_t> pages(int32_t stream) const { return pages_[stream]; }
  int32_t page_number(int32_t offset) const { return (first_slot_ + offset) / kernels::kPageTokens; }
  int32_t page(int32_t stream, int32_t offset) const { return pages_[stream][page_number(offset)]; }
  int32_t slot(int32_t offset) const { return (first_slot_ + offset) % kernels::kPageTokens; }
  int32_t num_streams() const { return static_cast<int32_t>(pages_.size()); }
  // Number of pages of all streams.
  int64_t num_pages() const { return static_cast<int64_t>(pages_.size() * (pages_.empty() ? 0 : pages_[0].size())); }
  PagePool& pool() const { return pool_; }

  // Summary of the whole source. A part that is not computed yet is empty; null: none is.
  std::shared_ptr<const SegmentSummary> summary() const;
  // Adds the parts that are not empty to the summary. Returns the new summary.
  std::shared_ptr<const SegmentSummary> KeepSummary(SegmentSummary part) const;

 private:
  PagePool& pool_;
  const int32_t begin_;
  const int32_t first_slot_;  // slot of tokens_[0]
  const std::vector<int32_t> tokens_;
  const SourceContext context_;
  const bool whole_ = true;
  std::vector<std::vector<int32_t>> pages_;  // [stream][page]
  mutable std::mutex summary_mutex_;         // guards summary_
  mutable std::shared_ptr<const SegmentSummary> summary_;
};

// Tokens of a prompt that a source has: positions [target, target + num_tokens) of the prompt are the source's tokens
// from `offset` on.
struct SegmentHit {
  std::shared_ptr<const SegmentSource> source;
  int32_t offset = 0;
  int32_t target = 0;
  int32_t num_tokens = 0;
  // True: other callers use the source, too; facts that one prompt adds to it must not depend on that prompt.
  bool shared = false;

  int32_t distance() const { return target - (source->begin() + offset); }  // by which keys must be rotated
};

}  // namespace spl::engine
