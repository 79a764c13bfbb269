#include "kernels/backend/host_session.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <thread>
#include <vector>

namespace spl::kernels {
namespace {

class CopiedBytes final : public HostCopy {
 public:
  CopiedBytes(const std::byte* from, size_t bytes) : bytes_(from, from + bytes) {}
  absl::StatusOr<const void*> Wait() override { return bytes_.data(); }

 private:
  const std::vector<std::byte> bytes_;
};

}  // namespace

HostSession::HostSession(const SessionOptions& options) {
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  threads_ = std::make_unique<ThreadPool>(options.num_threads > 0 ? options.num_threads : cores);
  context_ = {.pool = threads_.get(), .isa = options.isa, .session = this};
}

absl::Status HostSession::Zero(void* device, size_t bytes) {
  std::memset(device, 0, bytes);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<HostCopy>> HostSession::ReadBackLater(const void* device, size_t bytes) {
  return std::make_unique<CopiedBytes>(static_cast<const std::byte*>(device), bytes);
}

}  // namespace spl::kernels
