// The session of the backends that run on the host: a thread pool, and nothing to stage.
#pragma once

#include <memory>

#include "kernels/backend/session.h"
#include "kernels/common/thread_pool.h"

namespace spl::kernels {

class HostSession final : public Session {
 public:
  explicit HostSession(const SessionOptions& options);
  absl::Status Stage(const BatchArgs&) override { return absl::OkStatus(); }
  absl::Status RunStep(uint64_t, const std::function<absl::Status()>& step) override { return step(); }
  std::shared_ptr<const Fence> RecordFence() override { return nullptr; }
  absl::Status Zero(void* device, size_t bytes) override;
  absl::Status Synchronize() override { return absl::OkStatus(); }
  absl::StatusOr<const void*> ReadBack(const void* device, size_t) override { return device; }
  absl::StatusOr<std::unique_ptr<HostCopy>> ReadBackLater(const void* device, size_t bytes) override;

 private:
  std::unique_ptr<ThreadPool> threads_;
};

}  // namespace spl::kernels
