#include "kernels/backend/host_page_sends.h"

#include <utility>

namespace spl::kernels {
namespace {

class HostPageSends final : public PageSends {
 public:
  HostPageSends(size_t page_bytes, absl::Status (*send)(const SendPagesArgs&)) : page_bytes_(page_bytes), send_(send) {}

  absl::Status Start(std::span<const PageSend> pages, std::span<const std::shared_ptr<const Fence>> behind,
                     std::chrono::steady_clock::time_point deadline) override {
    absl::Status status;
    for (const auto& fence : behind) {
      if (fence != nullptr && status.ok()) status = fence->Wait();
    }
    const size_t first = crcs_.size();
    crcs_.resize(first + pages.size());
    if (status.ok())
      status = send_({.pages = pages, .page_bytes = page_bytes_, .crcs = crcs_.data() + first, .deadline = deadline});
    if (status_.ok()) status_ = status;
    return status;
  }

  absl::Status Finish(std::vector<uint32_t>& crcs) override {
    const absl::Status status = std::exchange(status_, absl::OkStatus());
    crcs = std::exchange(crcs_, {});
    if (!status.ok()) crcs.clear();
    return status;
  }

 private:
  const size_t page_bytes_;
  absl::Status (*const send_)(const SendPagesArgs&);
  std::vector<uint32_t> crcs_;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PageSends>> NewHostPageSends(size_t page_bytes,
                                                            absl::Status (*send)(const SendPagesArgs&)) {
  if (absl::Status valid = ValidatePageBytes(page_bytes); !valid.ok()) return valid;
  return std::make_unique<HostPageSends>(page_bytes, send);
}

}  // namespace spl::kernels
