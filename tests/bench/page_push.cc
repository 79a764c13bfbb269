#include "tests/bench/page_push.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <vector>

#include "services/base/status.h"

namespace spl {
namespace {

constexpr std::chrono::seconds kTimeout{60};

}  // namespace

absl::Status PushPages(prefill::PageSender& sender, const engine::SequenceKv& from, const engine::SequenceKv& to,
                       int32_t slice_tokens, const std::function<absl::Status()>& flush) {
  const engine::KvShape shape = from.shape();
  const int32_t pages = from.num_pages_per_stream(), step = std::max(1, slice_tokens / kernels::kPageTokens);
  struct Outcome {
    std::mutex mutex;
    std::condition_variable changed;
    size_t open = 0;
    absl::Status status;
  } outcome;
  std::deque<std::vector<uint32_t>> crcs;  // in place until Finish
  for (int32_t first = 0; first < pages; first += step) {
    const int32_t count = std::min(step, pages - first);
    for (int32_t layer = 0; layer < shape.num_layers; ++layer) {
      std::vector<int32_t> local;
      std::vector<uint32_t> remote;
      for (int32_t head = 0; head < shape.num_kv_heads; ++head) {
        const auto mine = from.stream(layer, head), theirs = to.stream(layer, head);
        for (int32_t page = first; page < first + count; ++page) {
          if (theirs[static_cast<size_t>(page)] == kernels::kNoPage) continue;
          local.push_back(mine[static_cast<size_t>(page)]);
          remote.push_back(static_cast<uint32_t>(theirs[static_cast<size_t>(page)]));
        }
      }
      if (local.empty()) continue;
      crcs.emplace_back(local.size());
      {
        std::lock_guard lock(outcome.mutex);
        ++outcome.open;
      }
      SPLICE_RETURN_IF_ERROR(sender.Send(from.pool(), {local, remote}, crcs.back().data(),
                                         std::chrono::steady_clock::now() + kTimeout,
                                         [&outcome](const absl::Status& status) {
                                           std::lock_guard lock(outcome.mutex);
                                           if (outcome.status.ok()) outcome.status = status;
                                           --outcome.open;
                                           outcome.changed.notify_all();
                                         }));
    }
  }
  sender.Finish();
  if (flush) SPLICE_RETURN_IF_ERROR(flush());
  std::unique_lock lock(outcome.mutex);
  if (!outcome.changed.wait_for(lock, kTimeout, [&] { return outcome.open == 0; }))
    return absl::DeadlineExceededError("the transfer did not end");
  return outcome.status;
}

absl::Status ExpectEqualPages(const engine::PagePool& from, std::span<const int32_t> source, const engine::PagePool& to,
                              std::span<const int32_t> target) {
  std::vector<uint32_t> sent(source.size()), arrived(target.size());
  SPLICE_RETURN_IF_ERROR(from.ChecksumPages(source, sent.data()));
  SPLICE_RETURN_IF_ERROR(to.ChecksumPages(target, arrived.data()));
  if (sent != arrived) return absl::DataLossError("pages arrived damaged");
  return absl::OkStatus();
}

}  // namespace spl
