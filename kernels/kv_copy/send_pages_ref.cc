#include <cstring>

#include "kernels/kv_copy/crc32c.h"
#include "kernels/kv_copy/send_pages.h"

namespace spl::kernels::ref {

absl::Status SendPages(const SendPagesArgs& a) {
  if (absl::Status valid = ValidatePageBytes(a.page_bytes); !valid.ok()) return valid;
  for (size_t i = 0; i < a.pages.size(); ++i) {
    if (std::chrono::steady_clock::now() >= a.deadline) return SentTooLate();
    std::memcpy(a.pages[i].to, a.pages[i].from, a.page_bytes);
    a.crcs[i] = ref::Crc32cExtend(0, a.pages[i].from, a.page_bytes);
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels::ref
