#include <condition_variable>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "kernels/collective/collective.h"

namespace spl::kernels {
namespace {

// State that the ranks of one group share.
struct HostGroup {
  HostGroup(int size, std::chrono::milliseconds timeout) : size(size), timeout(timeout), data(size), counts(size) {}

  // Returns when every rank has arrived. All writes of all ranks before it are visible then.
  absl::Status Barrier() {
    std::unique_lock lock(mutex);
    if (!aborted.ok()) return aborted;
    const uint64_t mine = generation;
    if (++arrived == size) {
      arrived = 0;
      ++generation;
      changed.notify_all();
      return absl::OkStatus();
    }
    const bool came = changed.wait_for(lock, timeout, [&] { return generation != mine || !aborted.ok(); });
    if (generation != mine) return absl::OkStatus();
    if (!came) {
      AbortLocked(absl::DeadlineExceededError(
          absl::StrCat("collective: ", size - arrived, " of ", size, " ranks did not come within ",
                       std::chrono::duration_cast<std::chrono::milliseconds>(timeout).count(), " ms")));
    }
    return aborted;
  }

  void AbortLocked(const absl::Status& why) {
    if (!aborted.ok()) return;
    aborted = why.ok() ? absl::AbortedError("collective: the group was aborted") : why;
    changed.notify_all();
  }

  const int size;
  const std::chrono::milliseconds timeout;
  std::mutex mutex;  // guards all up to the next blank line
  std::condition_variable changed;
  int arrived = 0;
  uint64_t generation = 0;
  absl::Status aborted;

  // Each rank writes its own pointer before a barrier and reads the others' after it.
  std::vector<float*> data;
  std::vector<int64_t> counts;
};

class HostCommunicator final : public Communicator {
 public:
  HostCommunicator(std::shared_ptr<HostGroup> group, int rank) : group_(std::move(group)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return group_->size; }

  absl::Status AllReduceSum(const KernelContext&, float* data, int64_t count) override {
    HostGroup& g = *group_;
    g.data[rank_] = data;
    g.counts[rank_] = count;
    if (absl::Status s = g.Barrier(); !s.ok()) return s;
    for (int r = 0; r < g.size; ++r) {
      if (g.counts[r] == count) continue;
      const absl::Status differ = absl::InternalError(
          absl::StrCat("collective: rank ", rank_, " sums ", count, " numbers, rank ", r, " sums ", g.counts[r]));
      Abort(differ);
      return differ;
    }
    // No other rank touches this part of the data until the second barrier.
    for (int64_t i = count * rank_ / g.size; i < count * (rank_ + 1) / g.size; ++i) {
      float sum = g.data[0][i];
      for (int r = 1; r < g.size; ++r) sum += g.data[r][i];
      for (int r = 0; r < g.size; ++r) g.data[r][i] = sum;
    }
    return g.Barrier();
  }

  void Abort(const absl::Status& why) override {
    std::lock_guard lock(group_->mutex);
    group_->AbortLocked(why);
  }

 private:
  const std::shared_ptr<HostGroup> group_;
  const int rank_;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> MakeHostGroup(int size, std::chrono::milliseconds timeout) {
  const auto group = std::make_shared<HostGroup>(size, timeout);
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int r = 0; r < size; ++r) ranks.push_back(std::make_unique<HostCommunicator>(group, r));
  return ranks;
}

}  // namespace spl::kernels
