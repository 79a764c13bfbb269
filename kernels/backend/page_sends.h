// Pages on their way from one device to memory that another process reads: the KV of a prompt, say, slice by slice.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/backend/session.h"
#include "kernels/kv_copy/send_pages.h"

namespace spl::kernels {

// One transfer, used by one thread at a time. Several transfers of a backend may be under way. The destructor waits
// until nothing is written any more.
class PageSends {
 public:
  virtual ~PageSends() = default;

  // Starts to send the pages behind the fences, which the device waits for where it can; a null fence is reached. Until
  // Finish the pages may not change, nor may their memory go away. No page is begun at `deadline` or later, whatever
  // the device was busy with until then. DeadlineExceeded: it has passed. After an error some of the pages may be under
  // way.
  virtual absl::Status Start(std::span<const PageSend> pages, std::span<const std::shared_ptr<const Fence>> behind,
                             std::chrono::steady_clock::time_point deadline) = 0;

  // Waits until nothing is written any more, and sets `crcs` to the CRC32C of every page since the last Finish, in the
  // order of the calls of Start. The first error since then is returned, here or by Start; `crcs` is then empty.
  // DeadlineExceeded: the device came to some pages too late, and did not write them.
  virtual absl::Status Finish(std::vector<uint32_t>& crcs) = 0;
};

}  // namespace spl::kernels
