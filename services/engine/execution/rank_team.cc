#include "services/engine/execution/rank_team.h"

#include "services/base/check.h"
#include "services/base/status.h"

namespace spl::engine {
namespace {

constexpr std::chrono::seconds kAbortTimeout{30};

}  // namespace

RankTeam::RankTeam(int num_ranks, std::function<void(const absl::Status&)> on_failure)
    : num_ranks_(num_ranks), on_failure_(std::move(on_failure)) {
  for (int rank = 0; rank < num_ranks; ++rank) threads_.emplace_back([this, rank] { Loop(rank); });
}

RankTeam::~RankTeam() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    start_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

absl::Status RankTeam::Run(const std::function<absl::Status(int)>& task) {
  std::unique_lock lock(mutex_);
  if (!broken_.ok()) return broken_;
  task_ = &task;
  num_running_ = num_ranks_;
  ++generation_;
  start_.notify_all();
  const bool in_time = done_.wait_for(lock, kRankTimeout, [&] { return num_running_ == 0 || !failure_.ok(); });
  if (num_running_ == 0 && failure_.ok()) return absl::OkStatus();
  const absl::Status why =
      in_time ? failure_
              : Errorf(absl::StatusCode::kDeadlineExceeded, "{} of {} ranks did not return within {} s", num_running_,
                       num_ranks_, kRankTimeout.count());
  // DataLoss as of a lost device (device_lost.h): the ranks have done different things and cannot go on together.
  broken_ = Annotate(Errorf(absl::StatusCode::kDataLoss, "{}", MessageOf(why)), "tensor-parallel group");
  lock.unlock();
  on_failure_(why);
  lock.lock();
  SPLICE_CHECK(done_.wait_for(lock, kAbortTimeout, [&] { return num_running_ == 0; }),
               "a rank of a tensor-parallel group does not return");
  return broken_;
}

void RankTeam::Loop(int rank) {
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    start_.wait(lock, [&] { return stopping_ || generation_ != seen; });
    if (stopping_) return;
    seen = generation_;
    const std::function<absl::Status(int)>& task = *task_;
    lock.unlock();
    const absl::Status status = task(rank);
    lock.lock();
    if (!status.ok() && failure_.ok()) failure_ = Annotate(status, fmt::format("rank {} of {}", rank, num_ranks_));
    --num_running_;
    if (num_running_ == 0 || !failure_.ok()) done_.notify_all();
  }
}

}  // namespace spl::engine
