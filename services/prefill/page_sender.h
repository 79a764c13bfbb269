// Four ways for pages to reach a decode worker: straight from host memory through the transport; from a GPU into its
// memory on the same host, by that GPU; from a GPU through page-locked staging memory and the transport; or from GPU to
// GPU.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend/backend.h"
#include "services/engine/engine.h"
#include "services/transport/kv_transport.h"

namespace spl::prefill {

// Page-locked host pages that a GPU's pages pass through on their way to the transport. Any thread may call.
class StagingPages {
 public:
  // `memory` and `backend` outlive it; the memory is page-locked for the backend's device.
  static absl::StatusOr<std::unique_ptr<StagingPages>> Create(std::byte* memory, size_t bytes, size_t page_bytes,
                                                              const kernels::Backend& backend);
  ~StagingPages();

  // Waits until `count` pages are free. DeadlineExceeded; InvalidArgument when there are fewer in all.
  absl::StatusOr<std::vector<std::byte*>> Acquire(size_t count, std::chrono::steady_clock::time_point deadline);
  void Release(std::span<std::byte* const> pages);
  size_t num_pages() const { return num_pages_; }

 private:
  StagingPages(std::byte* memory, const kernels::Backend& backend) : memory_(memory), backend_(backend) {}

  std::byte* const memory_;
  const kernels::Backend& backend_;
  size_t num_pages_ = 0;
  std::mutex mutex_;  // guards free_
  std::condition_variable freed_;
  std::vector<std::byte*> free_;  // ascending from the back, so that neighbours are given out together
};

// Where the pages of one ticket go. Borrowed for the call.
struct PageRun {
  std::span<const int32_t> local;    // pages of the prefill worker's pool
  std::span<const uint32_t> remote;  // as many pages of the target memory
};

// The pool of a decode worker on GPUs as this worker's reach it.
struct RemotePool {
  // [rank here][rank there]: the part of that rank, imported by the device of this one. Any page can go anywhere,
  // because the two workers may have their heads on different ranks.
  std::vector<std::vector<std::unique_ptr<kernels::Buffer>>> parts;
  uint32_t pages_per_part = 0;
};

// Page-locks the peer's memory that a channel has mapped. Released as soon as the channel is closed: another mapping
// may then come to lie at the same addresses.
class PinnedPeerMemory {
 public:
  static absl::StatusOr<std::unique_ptr<PinnedPeerMemory>> Create(std::span<std::byte> memory,
                                                                  const kernels::Backend& backend);
  ~PinnedPeerMemory() { Release(); }
  void Release();  // idempotent; one thread at a time

 private:
  PinnedPeerMemory(std::byte* memory, const kernels::Backend& backend) : memory_(memory), backend_(backend) {}
  std::byte* memory_;  // null: released, or page-locked by its owner in this process
  const kernels::Backend& backend_;
};

class PageSender {
 public:
  virtual ~PageSender() = default;
  virtual std::string carrier() const = 0;
  // True when pages go into the landing memory of a decode worker whose pool is on a GPU.
  virtual bool uses_landing_pages() const = 0;
  // Starts to write the pages, which are final, and fills crcs [local.size()] with their CRC32C. Blocks for what must
  // be done before the pages may be read by something else; `done` runs once, when the source may change again, with
  // the outcome; a sender may leave the last one to the next Send or to Finish. When Send fails, `done` does not run.
  // Nothing is written that would start after `lease_end`: DeadlineExceeded, returned or told.
  // One thread at a time. A sender may be destroyed before every `done` has run, what it was made with may not.
  virtual absl::Status Send(const engine::PagePool& pool, const PageRun& run, uint32_t* crcs,
                            std::chrono::steady_clock::time_point lease_end,
                            std::function<void(absl::Status)> done) = 0;
  // Before the transport is flushed: what bypasses it is written and told when this returns.
  virtual void Finish() {}
};

std::unique_ptr<PageSender> MakeHostSender(transport::KvChannel& channel, bool to_landing_pages);
// Of a model on GPUs, over a channel with mapped memory.
std::unique_ptr<PageSender> MakeMappedSender(transport::KvChannel& channel, bool to_landing_pages);
std::unique_ptr<PageSender> MakeStagedSender(transport::KvChannel& channel, StagingPages& staging,
                                             bool to_landing_pages);
std::unique_ptr<PageSender> MakeDeviceSender(const RemotePool& remote_pool);

}  // namespace spl::prefill
