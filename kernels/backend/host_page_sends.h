// PageSends where the host reaches all memory: Start sends, and nothing is under way when it returns.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend/page_sends.h"

namespace spl::kernels {

// `send`: the variant of SendPages.
absl::StatusOr<std::unique_ptr<PageSends>> NewHostPageSends(size_t page_bytes,
                                                            absl::Status (*send)(const SendPagesArgs&));

}  // namespace spl::kernels
