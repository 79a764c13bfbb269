#include "kernels/kv_copy/send_pages.h"

#include "kernels/common/status.h"

namespace spl::kernels {

absl::Status ValidatePageBytes(size_t page_bytes) {
  if (page_bytes > 0 && page_bytes % 16 == 0) return absl::OkStatus();
  return InvalidCall("SendPages: pages of ", page_bytes, " bytes; their size must be a multiple of 16");
}

absl::Status SentTooLate() {
  return absl::DeadlineExceededError("the lease ended before the write of some pages began; they were not written");
}

}  // namespace spl::kernels
