// Copies pages of KV to memory that another process reads, and takes the CRC32C of each on the way: one reading of a
// page for both. The variants on the host run at the call; for a GPU's see send_pages_cuda.h.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"

namespace spl::kernels {

struct PageSend {
  void* to = nullptr;
  const void* from = nullptr;
};

// Pages do not overlap where they are written.
struct SendPagesArgs {
  std::span<const PageSend> pages;
  size_t page_bytes = 0;  // a multiple of 16
  // [pages.size()]: CRC32C of each page as it was read; nothing for a page that was not written.
  uint32_t* crcs = nullptr;
  // No page is begun from then on.
  std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max();
};

// InvalidArgument: a page size that is no multiple of 16.
absl::Status ValidatePageBytes(size_t page_bytes);
// The error of a transfer whose deadline passed before all pages were begun.
absl::Status SentTooLate();

// DeadlineExceeded: the deadline passed, and pages were not written.
namespace ref {
absl::Status SendPages(const SendPagesArgs& args);
}
namespace cpu {
absl::Status SendPages(const SendPagesArgs& args);
}

}  // namespace spl::kernels
