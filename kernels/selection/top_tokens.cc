#include "kernels/selection/top_tokens.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels/common/parallel.h"
#include "kernels/common/status.h"
#include "kernels/selection/candidates.h"
#include "kernels/selection/selecting_sequence.h"
#include "kernels/selection/token_choice.h"

namespace spl::kernels {
namespace {

// How many of n granules a list takes.
struct Granules {
  int64_t num, taken, forced;

  Granules(const TopTokensArgs& a, const SelectingSequence& s, int32_t tokens)
      : num((int64_t{tokens} + a.granularity - 1) / a.granularity), taken(s.budget / a.granularity) {
    const int64_t first_recent = std::max(tokens - s.recent, 0) / a.granularity;
    forced = std::min(num - first_recent, taken);
  }
};

// Positions of the granules at tokens [0, n), in place from the back; returns how many.
int32_t Expand(int32_t* tokens, int64_t n, int32_t granularity, int32_t kv_len) {
  if (granularity == 1) return static_cast<int32_t>(n);
  int64_t count = 0;
  std::vector<int32_t> granules(tokens, tokens + n);
  for (const int32_t granule : granules) {
    const int32_t begin = granule * granularity, end = std::min(begin + granularity, kv_len);
    std::iota(tokens + count, tokens + count + (end - begin), begin);
    count += end - begin;
  }
  return static_cast<int32_t>(count);
}

// choose(scores, granules, out) for every stream that needs a choice.
template <typename Choose>
absl::Status ForEachStream(const KernelContext& ctx, const TopTokensArgs& a, const Choose& choose) {
  if (absl::Status s = ValidateTopTokens(a); !s.ok()) return s;
  for (const SelectingSequence& s : a.sequences) {
    for (int32_t h = 0; h < a.num_kv_heads && s.step.listed && s.step.selects; ++h) {
      if (absl::Status status = ValidateList("TopTokens", s, a.pool, h); !status.ok()) return status;
    }
  }
  ParallelTasks(ctx, static_cast<int64_t>(a.sequences.size()) * a.num_kv_heads, [&](int64_t stream) {
    const SelectingSequence& s = a.sequences[static_cast<size_t>(stream / a.num_kv_heads)];
    if (!s.selects(static_cast<int32_t>(stream % a.num_kv_heads))) return;
    int32_t* tokens = a.lists.tokens + stream * a.lists.stride;
    const Candidates own(a.pool, s, static_cast<int32_t>(stream % a.num_kv_heads));
    if (own.count() <= s.budget) {
      own.Copy(0, own.count(), tokens);
      a.lists.counts[stream] = own.count();
      return;
    }
    const Granules granules(a, s, own.count());
    choose(a.scores + stream * a.scores_stride, granules, tokens);
    a.lists.counts[stream] = Expand(tokens, granules.taken, a.granularity, own.count());
    own.ToPositions({tokens, static_cast<size_t>(a.lists.counts[stream])});
  });
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateTopTokens(const TopTokensArgs& a) {
  constexpr char kOp[] = "TopTokens";
  if (a.granularity != 1 && a.granularity != 16)
    return InvalidCall(kOp, ": granularity is ", a.granularity, ", it is 1 or 16");
  if (a.num_kv_heads <= 0) return InvalidCall(kOp, ": num_kv_heads is ", a.num_kv_heads);
  for (const SelectingSequence& s : a.sequences) {
    if (!s.step.selects) continue;
    if (s.kv_len < 1) return InvalidCall(kOp, ": a sequence that selects has kv_len ", s.kv_len);
    absl::Status status = ValidateCandidates(kOp, s, a.pool, a.num_kv_heads);
    if (status.ok()) status = ValidateListBudget(kOp, s, a.lists);
    if (!status.ok()) return status;
    if (s.budget % a.granularity != 0)
      return InvalidCall(kOp, ": budget ", s.budget, " is no multiple of granularity ", a.granularity);
    if (a.scores_stride < (int64_t{s.kv_len} + a.granularity - 1) / a.granularity)
      return InvalidCall(kOp, ": scores_stride ", a.scores_stride, " is too short for kv_len ", s.kv_len,
                         " at granularity ", a.granularity);
  }
  if (!a.sequences.empty() && (a.scores == nullptr || a.lists.tokens == nullptr || a.lists.counts == nullptr))
    return InvalidCall(kOp, ": scores, lists.tokens or lists.counts is null");
  return absl::OkStatus();
}

// The definition: a stable sort.
absl::Status ref::TopTokens(const KernelContext&, const TopTokensArgs& a) {
  return ForEachStream({}, a, [](const float* scores, const Granules& g, int32_t* out) {
    std::vector<int32_t> order(static_cast<size_t>(g.num - g.forced));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t i, int32_t j) { return OrderedBits(scores[i]) > OrderedBits(scores[j]); });
    std::copy_n(order.begin(), g.taken - g.forced, out);
    std::iota(out + g.taken - g.forced, out + g.taken, static_cast<int32_t>(g.num - g.forced));
    std::sort(out, out + g.taken);
  });
}

absl::Status cpu::TopTokens(const KernelContext& ctx, const TopTokensArgs& a) {
  return ForEachStream(ctx, a, [](const float* scores, const Granules& g, int32_t* out) {
    thread_local std::vector<uint32_t> bits;
    bits.resize(static_cast<size_t>(g.num));
    std::transform(scores, scores + g.num, bits.begin(), OrderedBits);
    ChooseLargest(bits, g.taken, g.forced, out);
  });
}

}  // namespace spl::kernels
