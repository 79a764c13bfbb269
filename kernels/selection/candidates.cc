#include "kernels/selection/candidates.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "kernels/common/parallel.h"
#include "kernels/common/status.h"

namespace spl::kernels {
namespace {

constexpr char kOp[] = "ListCandidates";

bool Lists(const SelectingSequence& s, int32_t kv_head) {
  return s.step.listed && !s.step.selects && !s.list_tables[static_cast<size_t>(kv_head)].empty();
}

// How many a list takes from the front and from the back of `count` candidates.
struct Ends {
  int32_t front = 0, back = 0;
  Ends(const LayerSelection& step, int32_t count) {
    const bool all = step.window == 0 || int64_t{step.num_sinks} + step.window >= count;
    front = all ? count : step.num_sinks;
    back = all ? 0 : step.window;
  }
  int64_t count() const { return int64_t{front} + back; }
};

// Checks of the host variants.
absl::Status ValidateLists(const ListCandidatesArgs& a) {
  if (absl::Status status = ValidateListCandidates(a); !status.ok()) return status;
  for (const SelectingSequence& s : a.sequences) {
    for (int32_t h = 0; h < a.num_kv_heads && s.step.listed && !s.step.selects; ++h) {
      if (!Lists(s, h)) continue;
      if (absl::Status status = ValidateList(kOp, s, a.pool, h); !status.ok()) return status;
      const int64_t count = Ends(s.step, Candidates(a.pool, s, h).count()).count();
      if (count > a.lists.stride)
        return InvalidCall(kOp, ": a list of ", count, " positions, lists.stride is ", a.lists.stride);
    }
  }
  return absl::OkStatus();
}

}  // namespace

Candidates::Candidates(const KvPoolView& pool, const SelectingSequence& s, int32_t kv_head)
    : pool_(pool), count_(s.kv_len) {
  if (!s.step.listed) return;
  pages_ = s.list_tables[static_cast<size_t>(kv_head)];
  if (pages_.empty()) return;
  per_page_ = ListEntriesPerPage(pool.page_bytes());
  first_fresh_ = s.first_fresh;
  num_listed_ = entry(0);
  count_ = num_listed_ + (s.kv_len - first_fresh_);
}

int32_t* Candidates::Copy(int32_t begin, int32_t end, int32_t* out) const {
  while (begin < std::min(end, num_listed_)) {  // the rest of a page
    const int64_t at = int64_t{begin} + 1;
    const auto n = static_cast<int32_t>(
        std::min(per_page_ - at % per_page_, static_cast<int64_t>(std::min(end, num_listed_) - begin)));
    const std::byte* const page = pool_.k(pages_[static_cast<size_t>(at / per_page_)]);
    std::memcpy(out, page + static_cast<size_t>(at % per_page_) * sizeof(int32_t),
                static_cast<size_t>(n) * sizeof(int32_t));
    out += n;
    begin += n;
  }
  if (begin >= end) return out;
  std::iota(out, out + (end - begin), first_fresh_ + (begin - num_listed_));
  return out + (end - begin);
}

void Candidates::ToPositions(std::span<int32_t> tokens) const {
  if (!listed()) return;
  for (int32_t& token : tokens) token = position(token);
}

absl::Status ValidateCandidates(const char* op, const SelectingSequence& s, const KvPoolView& pool,
                                int32_t num_kv_heads) {
  if (!s.step.listed) return absl::OkStatus();
  if (s.list_tables.size() != static_cast<size_t>(num_kv_heads))
    return InvalidCall(op, ": ", s.list_tables.size(), " list_tables for ", num_kv_heads, " KV heads");
  for (const std::span<const int32_t> pages : s.list_tables) {
    for (const int32_t page : pages) {
      if (!pool.contains(page))
        return InvalidCall(op, ": list_tables names page ", page, ", outside the pool of ", pool.num_pages);
    }
  }
  if (s.first_fresh < 0 || s.first_fresh > s.kv_len)
    return InvalidCall(op, ": first_fresh is ", s.first_fresh, ", the step writes position ", s.kv_len - 1);
  return absl::OkStatus();
}

absl::Status ValidateList(const char* op, const SelectingSequence& s, const KvPoolView& pool, int32_t kv_head) {
  const std::span<const int32_t> pages = s.list_tables[static_cast<size_t>(kv_head)];
  if (pages.empty()) return absl::OkStatus();
  const Candidates own(pool, s, kv_head);
  const int32_t num_listed = own.count() - (s.kv_len - s.first_fresh);
  if (num_listed < 0 || num_listed > s.first_fresh ||
      ListPages(num_listed, pool.page_bytes()) > static_cast<int64_t>(pages.size()))
    return InvalidCall(op, ": a list of ", num_listed, " positions on ", pages.size(), " pages, in front of ",
                       s.first_fresh);
  if (num_listed > 0 && own.position(num_listed - 1) >= s.first_fresh)
    return InvalidCall(op, ": the last listed position is ", own.position(num_listed - 1), ", first_fresh ",
                       s.first_fresh);
  return absl::OkStatus();
}

absl::Status ValidateListCandidates(const ListCandidatesArgs& a) {
  if (a.num_kv_heads <= 0) return InvalidCall(kOp, ": num_kv_heads is ", a.num_kv_heads);
  for (const SelectingSequence& s : a.sequences) {
    if (!s.step.listed || s.step.selects) continue;
    if (absl::Status status = ValidateCandidates(kOp, s, a.pool, a.num_kv_heads); !status.ok()) return status;
    if (s.step.num_sinks < 0 || s.step.window < 0)
      return InvalidCall(kOp, ": num_sinks is ", s.step.num_sinks, ", window ", s.step.window);
  }
  if (!a.sequences.empty() && (a.pool.base == nullptr || a.lists.tokens == nullptr || a.lists.counts == nullptr))
    return InvalidCall(kOp, ": pool.base, lists.tokens or lists.counts is null");
  return absl::OkStatus();
}

absl::Status ref::ListCandidates(const KernelContext&, const ListCandidatesArgs& a) {
  if (absl::Status s = ValidateLists(a); !s.ok()) return s;
  for (size_t i = 0; i < a.sequences.size(); ++i) {
    const SelectingSequence& s = a.sequences[i];
    for (int32_t h = 0; h < a.num_kv_heads; ++h) {
      if (!s.step.listed || s.step.selects || s.list_tables[static_cast<size_t>(h)].empty()) continue;
      const Candidates own(a.pool, s, h);
      const int64_t stream = static_cast<int64_t>(i) * a.num_kv_heads + h;
      int32_t count = 0;
      for (int32_t c = 0; c < own.count(); ++c) {
        if (s.step.window == 0 || c < s.step.num_sinks || c >= own.count() - s.step.window)
          a.lists.tokens[stream * a.lists.stride + count++] = own.position(c);
      }
      a.lists.counts[stream] = count;
    }
  }
  return absl::OkStatus();
}

absl::Status cpu::ListCandidates(const KernelContext& ctx, const ListCandidatesArgs& a) {
  if (absl::Status s = ValidateLists(a); !s.ok()) return s;
  ParallelTasks(ctx, static_cast<int64_t>(a.sequences.size()) * a.num_kv_heads, [&](int64_t stream) {
    const SelectingSequence& s = a.sequences[static_cast<size_t>(stream / a.num_kv_heads)];
    const auto h = static_cast<int32_t>(stream % a.num_kv_heads);
    if (!Lists(s, h)) return;
    const Candidates own(a.pool, s, h);
    const Ends ends(s.step, own.count());
    int32_t* const tokens = a.lists.tokens + stream * a.lists.stride;
    own.Copy(own.count() - ends.back, own.count(), own.Copy(0, ends.front, tokens));
    a.lists.counts[stream] = static_cast<int32_t>(ends.count());
  });
  return absl::OkStatus();
}

}  // namespace spl::kernels
