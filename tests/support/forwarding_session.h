// A session that passes everything on to another one: tests override what they watch, or what is to fail.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "kernels/backend/session.h"

namespace spl::test {

class ForwardingSession : public kernels::Session {
 public:
  explicit ForwardingSession(std::unique_ptr<kernels::Session> session) : inner(std::move(session)) {
    context_ = inner->context();
    context_.session = this;
  }
  absl::Status Stage(const kernels::BatchArgs& batch) override { return inner->Stage(batch); }
  absl::Status RunStep(uint64_t key, const std::function<absl::Status()>& step) override {
    return inner->RunStep(key, step);
  }
  std::shared_ptr<const kernels::Fence> RecordFence() override { return inner->RecordFence(); }
  absl::Status Zero(void* device, size_t bytes) override { return inner->Zero(device, bytes); }
  absl::Status Synchronize() override { return inner->Synchronize(); }
  absl::StatusOr<const void*> ReadBack(const void* device, size_t bytes) override {
    return inner->ReadBack(device, bytes);
  }
  absl::StatusOr<std::unique_ptr<kernels::HostCopy>> ReadBackLater(const void* device, size_t bytes) override {
    return inner->ReadBackLater(device, bytes);
  }

  const std::unique_ptr<kernels::Session> inner;
};

}  // namespace spl::test
