#include "services/prefill/page_sender.h"

#include <algorithm>

#include "kernels/kv_copy/crc32c.h"
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

void StagingPages::Release(std::span<std::byte* const> pages) {
  std::lock_guard lock(mutex_);
  free_.insert(free_.end(), pages.rbegin(), pages.rend());
  freed_.notify_all();
}

namespace {

class HostSender final : public PageSender {
 public:
  HostSender(transport::KvChannel& channel, bool to_landing_pages)
      : channel_(channel), to_landing_pages_(to_landing_pages) {}
  std::string carrier() const override { return channel_.carrier(); }
  bool uses_landing_pages() const override { return to_landing_pages_; }

  absl::Status Send(const engine::PagePool& pool, const PageRun& run, uint32_t* crcs,
                    std::chrono::steady_clock::time_point, std::function<void(absl::Status)> done) override {
    const size_t page_bytes = pool.view().page_bytes();
    SPLICE_RETURN_IF_ERROR(pool.ChecksumPages(run.local, crcs));
    std::vector<transport::PutOp> ops;
    ops.reserve(run.local.size());
    for (size_t i = 0; i < run.local.size(); ++i)
      ops.push_back({pool.view().k(run.local[i]), run.remote[i] * uint64_t{page_bytes}, page_bytes});
    return channel_.Put(std::move(ops), std::move(done));
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
                    std::chrono::steady_clock::time_point deadline, std::function<void(absl::Status)> done) override {
    const size_t portion = std::max<size_t>(1, staging_.num_pages() / 4);
    struct Progress {
      std::mutex mutex;  // guards all below
      size_t open = 1;   // portions on their way, and one for the loop
      absl::Status status;
      std::function<void(absl::Status)> done;
    };
    auto progress = std::make_shared<Progress>();
    progress->done = std::move(done);
    const auto finish = [](const std::shared_ptr<Progress>& p, const absl::Status& status) {
      std::function<void(absl::Status)> last;
      {
        std::lock_guard lock(p->mutex);
        if (p->status.ok()) p->status = status;
        if (--p->open > 0) return;
        last = std::move(p->done);
      }
      last(p->status);
    };
    absl::Status status;
    for (size_t begin = 0; begin < run.local.size() && status.ok(); begin += portion) {
      const size_t count = std::min(portion, run.local.size() - begin);
      {
        std::lock_guard lock(progress->mutex);
        ++progress->open;
      }
      status = SendPortion(pool, {run.local.subspan(begin, count), run.remote.subspan(begin, count)}, crcs + begin,
                           deadline, [progress, finish](const absl::Status& s) { finish(progress, s); });
      if (!status.ok()) finish(progress, status);
    }
    finish(progress, status);
    return absl::OkStatus();  // `done` tells
  }

 private:
  absl::Status SendPortion(const engine::PagePool& pool, const PageRun& run, uint32_t* crcs,
                           std::chrono::steady_clock::time_point deadline, std::function<void(absl::Status)> done) {
    const size_t page_bytes = pool.view().page_bytes();
    SPLICE_ASSIGN_OR_RETURN(std::vector<std::byte*> pages, staging_.Acquire(run.local.size(), deadline));
    absl::Status status = pool.ReadPagesTo(run.local, pages);
    if (status.ok()) {
      std::vector<transport::PutOp> ops;
      for (size_t i = 0; i < pages.size(); ++i) {
        crcs[i] = kernels::Crc32cExtend(0, pages[i], page_bytes);
        ops.push_back({pages[i], run.remote[i] * uint64_t{page_bytes}, page_bytes});
      }
      status = channel_.Put(std::move(ops), [this, pages, done](const absl::Status& s) {
        staging_.Release(pages);
        done(s);
      });
    }
    if (!status.ok()) staging_.Release(pages);
    return status;
  }

  transport::KvChannel& channel_;
  StagingPages& staging_;
  const bool to_landing_pages_;
};

class DeviceSender final : public PageSender {
 public:
  DeviceSender(const kernels::Backend& backend, const kernels::Buffer& remote_pool)
      : backend_(backend), remote_pool_(remote_pool) {}
  std::string carrier() const override { return "device"; }
  bool uses_landing_pages() const override { return false; }

  absl::Status Send(const engine::PagePool& pool, const PageRun& run, uint32_t* crcs,
                    std::chrono::steady_clock::time_point, std::function<void(absl::Status)> done) override {
    const size_t page_bytes = pool.view().page_bytes();
    std::vector<kernels::CopyOp> ops;
    for (size_t i = 0; i < run.local.size(); ++i) {
      std::byte* to = static_cast<std::byte*>(remote_pool_.data()) + run.remote[i] * uint64_t{page_bytes};
      const std::byte* from = pool.view().k(run.local[i]);
      if (!ops.empty() && static_cast<std::byte*>(ops.back().to) + ops.back().bytes == to &&
          static_cast<const std::byte*>(ops.back().from) + ops.back().bytes == from)
        ops.back().bytes += page_bytes;
      else
        ops.push_back({to, from, page_bytes});
    }
    SPLICE_RETURN_IF_ERROR(backend_.Copy(kernels::CopyKind::kWithin, ops));
    SPLICE_RETURN_IF_ERROR(pool.ChecksumPages(run.local, crcs));
    done(absl::OkStatus());
    return absl::OkStatus();
  }

 private:
  const kernels::Backend& backend_;
  const kernels::Buffer& remote_pool_;
};

}  // namespace

std::unique_ptr<PageSender> MakeHostSender(transport::KvChannel& channel, bool to_landing_pages) {
  return std::make_unique<HostSender>(channel, to_landing_pages);
}
std::unique_ptr<PageSender> MakeStagedSender(transport::KvChannel& channel, StagingPages& staging,
                                             bool to_landing_pages) {
  return std::make_unique<StagedSender>(channel, staging, to_landing_pages);
}
std::unique_ptr<PageSender> MakeDeviceSender(const kernels::Backend& backend, const kernels::Buffer& remote_pool) {
  return std::make_unique<DeviceSender>(backend, remote_pool);
}

}  // namespace spl::prefill
