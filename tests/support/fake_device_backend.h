// The CPU backend in the clothes of a device: its memory may only be reached through Copy, its page checksums and its
// handles. What the workers do for a GPU is tested with it on machines that have none.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <string>

#include "kernels/backend/backend.h"

namespace spl::test {

class FakeDeviceBackend : public kernels::Backend {
 public:
  explicit FakeDeviceBackend(const kernels::CpuBackendOptions& options = {}) : cpu_(kernels::MakeCpuBackend(options)) {}

  std::atomic<bool> lost{false};          // from here on operations fail as on a GPU whose context is gone
  mutable std::atomic<int> num_sends{0};  // calls of PageSends::Start
  kernels::DeviceMemory memory{.free_bytes = 60ull << 30, .total_bytes = 80ull << 30};

  std::string name() const override { return "fake-device"; }
  std::string description() const override { return "a device made of host memory, for tests"; }
  bool host_memory() const override { return false; }
  absl::StatusOr<std::unique_ptr<kernels::Session>> NewSession(const kernels::SessionOptions& options) const override {
    return cpu_->NewSession(options);
  }
  using kernels::Backend::Copy;
  absl::Status Copy(kernels::CopyKind kind, std::span<const kernels::CopyOp> ops) const override {
    return cpu_->Copy(kind, ops);
  }
  absl::StatusOr<std::vector<std::unique_ptr<kernels::Communicator>>> NewGroup(
      std::span<const kernels::Backend* const> ranks) const override {
    return cpu_->NewGroup(ranks);
  }
  absl::StatusOr<std::string> Export(const kernels::Buffer& buffer) const override {
    const uint64_t words[] = {reinterpret_cast<uint64_t>(buffer.data()), buffer.size()};
    return std::string(reinterpret_cast<const char*>(words), sizeof(words));
  }
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> Import(const std::string& handle) const override {
    uint64_t words[2];
    if (handle.size() != sizeof(words)) return absl::InvalidArgumentError("not a handle");
    std::memcpy(words, handle.data(), sizeof(words));
    return std::make_unique<View>(reinterpret_cast<void*>(words[0]), words[1]);
  }
  absl::Status PageChecksums(const kernels::KvPoolView& pool, std::span<const int32_t> pages,
                             uint32_t* out) const override {
    return cpu_->PageChecksums(pool, pages, out);
  }
  absl::StatusOr<std::unique_ptr<kernels::PageSends>> NewPageSends(size_t page_bytes) const override {
    auto sends = cpu_->NewPageSends(page_bytes);
    if (!sends.ok()) return sends.status();
    return std::make_unique<CountedSends>(*std::move(sends), num_sends);
  }
  absl::StatusOr<kernels::DeviceMemory> Memory() const override { return memory; }
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> Allocate(size_t bytes) const override {
    return cpu_->Allocate(bytes);
  }
  absl::StatusOr<std::unique_ptr<kernels::LinearWeight>> PackLinear(const kernels::WeightView& w) const override {
    return cpu_->PackLinear(w);
  }
#define SPLICE_FORWARD(name, args)                                                                 \
  absl::Status name(const kernels::KernelContext& ctx, const kernels::args& a) const override {    \
    if (lost) return absl::DataLossError("fake device: an illegal memory access was encountered"); \
    return cpu_->name(ctx, a);                                                                     \
  }
  SPLICE_OPERATIONS(SPLICE_FORWARD)
#undef SPLICE_FORWARD

 private:
  class View final : public kernels::Buffer {
   public:
    View(void* data, size_t size) : data_(data), size_(size) {}
    void* data() const override { return data_; }
    size_t size() const override { return size_; }

   private:
    void* const data_;
    const size_t size_;
  };

  class CountedSends final : public kernels::PageSends {
   public:
    CountedSends(std::unique_ptr<kernels::PageSends> sends, std::atomic<int>& count)
        : sends_(std::move(sends)), count_(count) {}
    absl::Status Start(std::span<const kernels::PageSend> pages,
                       std::span<const std::shared_ptr<const kernels::Fence>> behind,
                       std::chrono::steady_clock::time_point deadline) override {
      ++count_;
      return sends_->Start(pages, behind, deadline);
    }
    absl::Status Finish(std::vector<uint32_t>& crcs) override { return sends_->Finish(crcs); }

   private:
    const std::unique_ptr<kernels::PageSends> sends_;
    std::atomic<int>& count_;
  };

  const std::unique_ptr<kernels::Backend> cpu_;
};

}  // namespace spl::test
