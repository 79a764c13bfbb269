#include <algorithm>
#include <cstring>

#include "kernels/kv_copy/crc32c.h"
#include "kernels/kv_copy/send_pages.h"

namespace spl::kernels::cpu {
namespace {

// Copied, then summed while the first cache still holds it.
constexpr size_t kPieceBytes = 8 << 10;

uint32_t SendPage(const PageSend& page, size_t bytes) {
  const auto* const from = static_cast<const std::byte*>(page.from);
  uint32_t crc = 0;
  for (size_t at = 0; at < bytes; at += kPieceBytes) {
    const size_t piece = std::min(kPieceBytes, bytes - at);
    std::memcpy(static_cast<std::byte*>(page.to) + at, from + at, piece);
    crc = Crc32cExtend(crc, from + at, piece);
  }
  return crc;
}

}  // namespace

absl::Status SendPages(const SendPagesArgs& a) {
  if (absl::Status valid = ValidatePageBytes(a.page_bytes); !valid.ok()) return valid;
  for (size_t i = 0; i < a.pages.size(); ++i) {
    if (std::chrono::steady_clock::now() >= a.deadline) return SentTooLate();
    a.crcs[i] = SendPage(a.pages[i], a.page_bytes);
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels::cpu
