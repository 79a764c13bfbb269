#include "services/prefill_work/page_sender.h"

#include <algorithm>
#include <utility>

#include "services/base/status.h"

namespace spl::prefill {

absl::StatusOr<std::unique_ptr<StagingPages>> StagingPages::Create(std::byte* memory, size_t bytes, size_t page_bytes,
                                                                   const kernels::Backend& backend) {
  SPLICE_RETURN_IF_ERROR(backend.PinHost(memory, bytes));
  auto staging = std::unique_ptr<StagingPages>(new StagingPages(memory, backend));
  staging->num_pages_ = bytes / page_bytes;
  for (size_t i = staging->num_pages_; i-- > 0;) staging->free_.push_back(memory + i * page_bytes);
  return staging;
}

StagingPages::~StagingPages() { backend_.UnpinHost(memory_); }

absl::StatusOr<std::vector<std::byte*>> StagingPages::Acquire(size_t count,
                                                              std::chrono::steady_clock::time_point deadline) {
  if (count > num_pages_)
    return InvalidArgument("{} staging pages are needed at once, there are {}", count, num_pages_);
  std::unique_lock lock(mutex_);
  if (!freed_.wait_until(lock, deadline, [&] { return free_.size() >= count; }))
    return Errorf(absl::StatusCode::kDeadlineExceeded, "no staging memory for {} pages in time", count);
  std::vector<std::byte*> pages(free_.rbegin(), free_.rbegin() + static_cast<std::ptrdiff_t>(count));
  free_.resize(free_.size() - count);
  return pages;
}

absl::StatusOr<std::unique_ptr<PinnedPeerMemory>> PinnedPeerMemory::Create(std::span<std::byte> memory,
                                                                           const kernels::Backend& backend) {
  const absl::Status pinned = backend.PinHost(memory.data(), memory.size());
  const bool by_owner = pinned.code() == absl::StatusCode::kAlreadyExists;
  if (!pinned.ok() && !by_owner) return pinned;
  return std::unique_ptr<PinnedPeerMemory>(new PinnedPeerMemory(by_owner ? nullptr : memory.data(), backend));
}

void PinnedPeerMemory::Release() {
  if (memory_ != nullptr) backend_.UnpinHost(memory_);
  memory_ = nullptr;
}

void StagingPages::Release(std::span<std::byte* const> pages) {
  std::lock_guard lock(mutex_);
  free_.insert(free_.end(), pages.rbegin(), pages.rend());
  freed_.notify_all();
}

namespace {

absl::Status WaitFor(std::span<const std::shared_ptr<const kernels::Fence>> fences) {
  for (const auto& fence : fences) {
    if (fence != nullptr) SPLICE_RETURN_IF_ERROR(fence->Wait());
  }
  return absl::OkStatus();
}

class HostSender final : public PageSender {
 public:
  HostSender(transport::KvChannel& channel, bool to_landing_pages)
      : channel_(channel), to_landing_pages_(to_landing_pages) {}
  std::string carrier() const override { return channel_.carrier(); }
  bool uses_landing_pages() const override { return to_landing_pages_; }

  absl::Status Send(const engine::PagePool& pool, const PageRun& run, uint32_t* crcs,
                    std::chrono::steady_clock::time_point lease_end, std::function<void(absl::Status)> done) override {
    const size_t page_bytes = pool.view().page_bytes();
    SPLICE_RETURN_IF_ERROR(WaitFor(run.behind));
    SPLICE_RETURN_IF_ERROR(pool.ChecksumPages(run.local, crcs));
    std::vector<transport::PutOp> ops;
    ops.reserve(run.local.size());
    for (size_t i = 0; i < run.local.size(); ++i)
      ops.push_back({pool.view().k(run.local[i]), run.remote[i] * uint64_t{page_bytes}, page_bytes});
    return channel_.Put(std::move(ops), std::move(done), lease_end);
  }

 private:
  transport::KvChannel& channel_;
  const bool to_landing_pages_;
};

// Counts the writes of one Send in flight, and calls its `done` when all have ended.
class Progress {
 public:
  explicit Progress(std::function<void(absl::Status)> done) : done_(std::move(done)) {}
  void Start() {
    std::lock_guard lock(mutex_);
    ++open_;
  }
  void End(const absl::Status& status) {
    std::function<void(absl::Status)> last;
    absl::Status outcome;
    {
      std::lock_guard lock(mutex_);
      if (status_.ok()) status_ = status;
      if (--open_ > 0) return;
      last = std::move(done_);
      outcome = status_;
    }
    last(outcome);
  }

 private:
  std::mutex mutex_;  // guards all below
  size_t open_ = 1;   // one for the loop that starts the others
  absl::Status status_;
  std::function<void(absl::Status)> done_;
};

// The rank's own GPU writes the decode worker's memory, on the thread on which the transport would copy.
class MappedSender final : public PageSender {
 public:
  MappedSender(transport::KvChannel& channel, bool to_landing_pages)
      : channel_(channel), to_landing_pages_(to_landing_pages) {}
  std::string carrier() const override { return "dma+" + channel_.carrier(); }
  bool uses_landing_pages() const override { return to_landing_pages_; }

  absl::Status Send(const engine::PagePool& pool, const PageRun& run, uint32_t* crcs,
                    std::chrono::steady_clock::time_point lease_end, std::function<void(absl::Status)> done) override {
    const uint64_t page_bytes = pool.view().page_bytes();
    SPLICE_RETURN_IF_ERROR(WaitFor(run.behind));
    std::vector<std::vector<transport::PutOp>> ops(pool.view().num_ranks());
    for (size_t i = 0; i < run.local.size(); ++i)
      ops[pool.view().rank_of(run.local[i])].push_back(
          {pool.view().k(run.local[i]), run.remote[i] * page_bytes, page_bytes});
    const auto progress = std::make_shared<Progress>(std::move(done));
    absl::Status status;
    for (size_t r = 0; r < ops.size() && status.ok(); ++r) {
      if (ops[r].empty()) continue;
      const auto copy = [backend = pool.backend(r)](std::span<const transport::MappedWrite> writes) {
        std::vector<kernels::CopyOp> copies;
        for (const transport::MappedWrite& write : writes) copies.push_back({write.to, write.from, write.bytes});
        return backend->Copy(kernels::CopyKind::kDownload, copies);
      };
      progress->Start();
      status = channel_.PutThrough(
          copy, std::move(ops[r]), [progress](const absl::Status& s) { progress->End(s); }, lease_end);
      if (!status.ok()) progress->End(status);
    }
    if (status.ok()) status = pool.ChecksumPages(run.local, crcs);  // beside the copies
    progress->End(status);
    return absl::OkStatus();  // `done` tells
  }

 private:
  transport::KvChannel& channel_;
  const bool to_landing_pages_;
};

class StagedSender final : public PageSender {
 public:
  StagedSender(transport::KvChannel& channel, StagingPages& staging, bool to_landing_pages)
      : channel_(channel), staging_(staging), to_landing_pages_(to_landing_pages) {}
  std::string carrier() const override { return "staged+" + channel_.carrier(); }
  bool uses_landing_pages() const override { return to_landing_pages_; }

  // In portions of a quarter of the staging memory: the transport writes one while the next is copied.
  absl::Status Send(const engine::PagePool& pool, const PageRun& run, uint32_t* crcs,
                    std::chrono::steady_clock::time_point lease_end, std::function<void(absl::Status)> done) override {
    SPLICE_RETURN_IF_ERROR(WaitFor(run.behind));
    const size_t portion = std::max<size_t>(1, staging_.num_pages() / 4);
    const auto progress = std::make_shared<Progress>(std::move(done));
    absl::Status status;
    for (size_t begin = 0; begin < run.local.size() && status.ok(); begin += portion) {
      const size_t count = std::min(portion, run.local.size() - begin);
      progress->Start();
      status = SendPortion(pool, {.local = run.local.subspan(begin, count), .remote = run.remote.subspan(begin, count)},
                           crcs + begin, lease_end, [progress](const absl::Status& s) { progress->End(s); });
      if (!status.ok()) progress->End(status);
    }
    progress->End(status);
    return absl::OkStatus();  // `done` tells
  }

 private:
  absl::Status SendPortion(const engine::PagePool& pool, const PageRun& run, uint32_t* crcs,
                           std::chrono::steady_clock::time_point lease_end, std::function<void(absl::Status)> done) {
    const size_t page_bytes = pool.view().page_bytes();
    SPLICE_ASSIGN_OR_RETURN(std::vector<std::byte*> pages, staging_.Acquire(run.local.size(), lease_end));
    absl::Status status = pool.ReadPagesTo(run.local, pages);
    if (status.ok()) status = pool.ChecksumPages(run.local, crcs);
    if (status.ok()) {
      std::vector<transport::PutOp> ops;
      for (size_t i = 0; i < pages.size(); ++i)
        ops.push_back({pages[i], run.remote[i] * uint64_t{page_bytes}, page_bytes});
      status = channel_.Put(
          std::move(ops),
          [&staging = staging_, pages, done](const absl::Status& s) {
            staging.Release(pages);
            done(s);
          },
          lease_end);
    }
    if (!status.ok()) staging_.Release(pages);
    return status;
  }

  transport::KvChannel& channel_;
  StagingPages& staging_;
  const bool to_landing_pages_;
};

// Every rank's GPU sends its own pages, beside the others.
class DeviceSender final : public PageSender {
 public:
  explicit DeviceSender(const RemotePool& remote) : remote_(remote), ranks_(remote.parts.size()) {}
  ~DeviceSender() override { Finish(); }
  std::string carrier() const override { return "device"; }
  bool uses_landing_pages() const override { return false; }
  bool waits_on_device() const override { return true; }

  absl::Status Send(const engine::PagePool& pool, const PageRun& run, uint32_t* crcs,
                    std::chrono::steady_clock::time_point lease_end, std::function<void(absl::Status)> done) override {
    const absl::Status status = Start(pool, run, crcs, lease_end);
    if (status.ok())
      done_.push_back(std::move(done));
    else
      Finish();  // nothing may still read the pages when this returns
    return status;
  }

  void Finish() override {
    absl::Status status;
    std::vector<uint32_t> crcs;
    for (Rank& rank : ranks_) {
      if (rank.sends == nullptr) continue;
      const absl::Status sent = rank.sends->Finish(crcs);
      if (status.ok()) status = sent;
      for (size_t i = 0; i < crcs.size(); ++i) *rank.crcs[i] = crcs[i];
      rank.crcs.clear();
    }
    for (const auto& done : std::exchange(done_, {})) done(status);
  }

 private:
  struct Rank {
    std::unique_ptr<kernels::PageSends> sends;  // null: it has sent nothing yet
    std::vector<uint32_t*> crcs;                // where those of its pages belong, since the last Finish
    std::vector<kernels::PageSend> pages;       // of the Send that runs
  };

  absl::Status Start(const engine::PagePool& pool, const PageRun& run, uint32_t* crcs,
                     std::chrono::steady_clock::time_point lease_end) {
    const size_t page_bytes = pool.view().page_bytes();
    for (Rank& rank : ranks_) rank.pages.clear();
    for (size_t i = 0; i < run.local.size(); ++i) {
      const size_t at = pool.view().rank_of(run.local[i]);
      const uint32_t part = run.remote[i] / remote_.pages_per_part, page = run.remote[i] % remote_.pages_per_part;
      ranks_[at].pages.push_back(
          {static_cast<std::byte*>(remote_.parts[at][part]->data()) + page * page_bytes, pool.view().k(run.local[i])});
      ranks_[at].crcs.push_back(crcs + i);
    }
    for (size_t at = 0; at < ranks_.size(); ++at) {
      Rank& rank = ranks_[at];
      if (rank.pages.empty()) continue;
      if (rank.sends == nullptr) {
        SPLICE_ASSIGN_OR_RETURN(rank.sends, pool.backend(at)->NewPageSends(page_bytes));
      }
      SPLICE_RETURN_IF_ERROR(rank.sends->Start(rank.pages, run.behind, lease_end));
    }
    return absl::OkStatus();
  }

  const RemotePool& remote_;
  std::vector<Rank> ranks_;
  std::vector<std::function<void(absl::Status)>> done_;  // of all since the last Finish
};

}  // namespace

std::unique_ptr<PageSender> MakeHostSender(transport::KvChannel& channel, bool to_landing_pages) {
  return std::make_unique<HostSender>(channel, to_landing_pages);
}
std::unique_ptr<PageSender> MakeStagedSender(transport::KvChannel& channel, StagingPages& staging,
                                             bool to_landing_pages) {
  return std::make_unique<StagedSender>(channel, staging, to_landing_pages);
}
std::unique_ptr<PageSender> MakeMappedSender(transport::KvChannel& channel, bool to_landing_pages) {
  return std::make_unique<MappedSender>(channel, to_landing_pages);
}
std::unique_ptr<PageSender> MakeDeviceSender(const RemotePool& remote_pool) {
  return std::make_unique<DeviceSender>(remote_pool);
}

}  // namespace spl::prefill
