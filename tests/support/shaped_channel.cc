#include "tests/support/shaped_channel.h"

#include <utility>

#include "services/base/status.h"

namespace spl {

using Clock = std::chrono::steady_clock;

ShapedChannel::ShapedChannel(transport::KvChannel& inner, double bytes_per_s)
    : inner_(inner), bytes_per_s_(bytes_per_s), thread_([this] { Loop(); }) {}

ShapedChannel::~ShapedChannel() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

absl::Status ShapedChannel::Put(std::vector<transport::PutOp> ops, std::function<void(absl::Status)> done,
                                transport::LeaseEnd lease_end) {
  size_t bytes = 0;
  for (const transport::PutOp& op : ops) bytes += op.bytes;
  std::lock_guard lock(mutex_);
  line_free_ = std::max(line_free_, Clock::now()) +
               std::chrono::duration_cast<Clock::duration>(
                   std::chrono::duration<double>(static_cast<double>(bytes) / bytes_per_s_));
  line_.push_back({std::move(ops), std::move(done), lease_end, line_free_});
  changed_.notify_all();
  return absl::OkStatus();
}

absl::Status ShapedChannel::PutThrough(transport::Copier, std::vector<transport::PutOp>,
                                       std::function<void(absl::Status)>, transport::LeaseEnd) {
  return absl::FailedPreconditionError("a shaped channel has no mapped memory");
}

absl::Status ShapedChannel::Get(std::vector<transport::GetOp>, std::function<void(absl::Status)>) {
  return absl::UnimplementedError("a shaped channel is only written");
}

void ShapedChannel::Loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || !line_.empty(); });
    if (stopping_) return;
    const auto due = line_.front().off_the_line;
    if (Clock::now() < due) {
      changed_.wait_until(lock, due, [&] { return stopping_; });
      continue;
    }
    Write write = std::move(line_.front());
    line_.pop_front();
    busy_ = true;
    lock.unlock();
    const auto done = write.done;
    if (const absl::Status put = inner_.Put(std::move(write.ops), std::move(write.done), write.lease_end); !put.ok())
      done(put);
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

bool ShapedChannel::WaitUntilSent(Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline, [&] { return line_.empty() && !busy_; });
}

absl::Status ShapedChannel::Flush(std::function<void(absl::Status)>) {
  return absl::UnimplementedError("a shaped channel is flushed by FlushAndWait");
}

absl::Status ShapedChannel::FlushAndWait(std::chrono::nanoseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  if (!WaitUntilSent(deadline)) return absl::DeadlineExceededError("the line was not empty in time");
  return inner_.FlushAndWait(deadline - Clock::now());
}

absl::Status ShapedChannel::Close(std::chrono::nanoseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  if (!WaitUntilSent(deadline)) return absl::DeadlineExceededError("the line was not empty in time");
  return inner_.Close(deadline - Clock::now());
}

}  // namespace spl
