// Four paths for pages to a decode worker: from host memory through the transport; from a GPU into host memory of a
// worker on the same host, by that GPU; from a GPU through page-locked staging memory and the transport; or from GPU to
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

// Page-locked host pages through which a GPU's pages pass on the way to the transport. Any thread may call.
class StagingPages {
 public:
  // `memory` and `backend` must outlive it. Page-locks the memory for the backend's device.
  static absl::StatusOr<std::unique_ptr<StagingPages>> Create(std::byte* memory, size_t bytes, size_t page_bytes,
                                                              const kernels::Backend& backend);
  ~StagingPages();

  // Waits until `count` pages are free. DeadlineExceeded: they were not. InvalidArgument: there are fewer in all.
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

// Source and target of the pages of one ticket. Borrowed for the call.
struct PageRun {
  std::span<const int32_t> local;    // pages of the prefill worker's pool
  std::span<const uint32_t> remote;  // as many pages of the target memory
  // The pages are final once these are reached; null ones are.
  std::span<const std::shared_ptr<const kernels::Fence>> behind = {};
};

// The pool of a decode worker on GPUs, as this worker's GPUs reach it.
struct RemotePool {
  // [rank here][rank there]: that rank's part, imported by this rank's device. Any page can go anywhere, because the
  // two workers may have their heads on different ranks.
  std::vector<std::vector<std::unique_ptr<kernels::Buffer>>> parts;
  uint32_t pages_per_part = 0;
};

// Page-locks the peer's memory that a channel has mapped. Release it as soon as the channel is closed: another mapping
// may then lie at the same addresses.
class PinnedPeerMemory {
 public:
  static absl::StatusOr<std::unique_ptr<PinnedPeerMemory>> Create(std::span<std::byte> memory,
                                                                  const kernels::Backend& backend);
  ~PinnedPeerMemory() { Release(); }
  void Release();  // idempotent; one thread at a time

 private:
  PinnedPeerMemory(std::byte* memory, const kernels::Backend& backend) : memory_(memory), backend_(backend) {}
  std::byte* memory_;  // null: released, or already page-locked by its owner in this process
  const kernels::Backend& backend_;
};

class PageSender {
 public:
  virtual ~PageSender() = default;
  virtual std::string carrier() const = 0;
  // True: pages go into the landing memory of a decode worker whose pool is on a GPU.
  virtual bool uses_landing_pages() const = 0;
  // True: Send does not wait for the fences, the device does. Many layers of a prompt may then go into one call.
  virtual bool waits_on_device() const { return false; }
  // Starts to write the pages. `crcs` [local.size()], which must stay in place until Finish, has their CRC32C then.
  // `done` runs once, with the outcome, when the source may change again; a sender may leave it to Finish. If Send
  // fails, `done` does not run. DeadlineExceeded, returned or passed to `done`: a write would have started at
  // `lease_end` or later, and did not. This holds for writes that a device has in its queue, too: it looks at its clock
  // before each page.
  //
  // One thread at a time. A sender may be destroyed before every `done` has run; the objects that it was made with may
  // not.
  virtual absl::Status Send(const engine::PagePool& pool, const PageRun& run, uint32_t* crcs,
                            std::chrono::steady_clock::time_point lease_end,
                            std::function<void(absl::Status)> done) = 0;
  // Call before the transport is flushed. On return the checksums are there, all writes that bypass the transport are
  // complete, and their `done` has run.
  virtual void Finish() {}
};

std::unique_ptr<PageSender> MakeHostSender(transport::KvChannel& channel, bool to_landing_pages);
// For a model on GPUs, over a channel with mapped memory.
std::unique_ptr<PageSender> MakeMappedSender(transport::KvChannel& channel, bool to_landing_pages);
std::unique_ptr<PageSender> MakeStagedSender(transport::KvChannel& channel, StagingPages& staging,
                                             bool to_landing_pages);
// Cost: no wait but in Finish; a launch for each Send and GPU.
std::unique_ptr<PageSender> MakeDeviceSender(const RemotePool& remote_pool);

}  // namespace spl::prefill
