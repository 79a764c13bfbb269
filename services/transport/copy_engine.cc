#include "services/transport/copy_engine.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>

#include "services/base/fault_point.h"
#include "services/base/thread_priority.h"

namespace spl::transport {
namespace {

FaultPoint piece_fault("transport.piece");  // delays a piece of a mapped copy that was found to be in time

constexpr size_t kMaxJobs = 4096;
// At 10 GB/s a piece takes 0.1 ms: that is how soon a closed or lost channel stops writing.
constexpr size_t kPieceBytes = 1 << 20;

absl::Status MayStart(const CopyJob& job) {
  if (absl::Status status = job.interrupted(); !status.ok()) return status;
  return std::chrono::steady_clock::now() < job.lease_end ? absl::OkStatus() : job.late();
}

absl::Status RunCopy(const CopyJob& job) {
  if (job.copier && !job.ops.empty()) {
    std::vector<MappedWrite> writes;
    for (const RmaOp& op : job.ops) writes.push_back({job.remote + op.remote_offset, op.local, op.bytes});
    if (absl::Status status = MayStart(job); !status.ok()) return status;
    if (absl::Status status = job.copier(writes); !status.ok()) return status;
    return job.interrupted();
  }
  for (const RmaOp& op : job.ops) {
    for (size_t copied = 0; copied < op.bytes; copied += kPieceBytes) {
      if (absl::Status status = MayStart(job); !status.ok()) return status;
      if (piece_fault.armed()) (void)piece_fault.Hit();
      std::byte* const remote = job.remote + op.remote_offset + copied;
      const size_t bytes = std::min(kPieceBytes, op.bytes - copied);
      if (job.is_get) {
        std::memcpy(op.local + copied, remote, bytes);
      } else {
        std::memcpy(remote, op.local + copied, bytes);
      }
    }
  }
  return job.interrupted();
}

}  // namespace

CopyEngine::CopyEngine() : thread_([this] { Loop(); }) {}

CopyEngine::~CopyEngine() { Stop(); }

bool CopyEngine::Push(CopyJob job) {
  {
    std::lock_guard lock(mutex_);
    if (stopping_ || jobs_.size() >= kMaxJobs) return false;
    jobs_.push_back(std::move(job));
  }
  changed_.notify_one();
  return true;
}

void CopyEngine::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void CopyEngine::Loop() {
  SetThreadPriority(ThreadPriority::kTransfer);
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    CopyJob job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job.done(RunCopy(job));
    job = CopyJob();  // the job's resources are released outside the lock
    lock.lock();
  }
}

}  // namespace spl::transport
