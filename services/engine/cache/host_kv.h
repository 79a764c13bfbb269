// Host memory for KV pages of sequences that decode over chosen tokens (docs/decisions/0019-host-tier.md).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend/backend.h"
#include "services/engine/cache/page_pool.h"
#include "services/engine/model/model.h"

namespace spl::engine {

// Owns the memory, page-locked for the devices of the model, and its pages. Any thread may call. The pages must have
// been given back before this ends.
class HostKv {
 public:
  // Takes `bytes`, rounded down to whole pages. ResourceExhausted: the host has no such memory, or it cannot be
  // page-locked. InvalidArgument: less than a page. Cost: page-locking touches all of the memory.
  static absl::StatusOr<std::unique_ptr<HostKv>> Create(const Model& model, size_t bytes);
  // The same over host memory of the caller, 64-byte aligned, which is not page-locked yet.
  static absl::StatusOr<std::unique_ptr<HostKv>> Over(const Model& model, std::unique_ptr<kernels::Buffer> memory);
  ~HostKv();
  HostKv(const HostKv&) = delete;
  HostKv& operator=(const HostKv&) = delete;

  PagePool& pages() { return *pages_; }
  const PagePool& pages() const { return *pages_; }
  std::byte* page(int32_t number) const { return pages_->view().k(number); }
  size_t used_bytes() const {
    return static_cast<size_t>(pages_->num_pages() - pages_->num_free()) * pages_->view().page_bytes();
  }

  // Rows of host pages that steps have listed so far, and those of them that were copied to the device.
  struct Counts {
    uint64_t listed = 0;
    uint64_t copied = 0;
  };
  void Add(const Counts& more) {
    listed_.fetch_add(more.listed, std::memory_order_relaxed);
    copied_.fetch_add(more.copied, std::memory_order_relaxed);
  }
  Counts counts() const { return {listed_.load(std::memory_order_relaxed), copied_.load(std::memory_order_relaxed)}; }

 private:
  HostKv(const kernels::Backend& backend, std::unique_ptr<kernels::Buffer> memory)
      : backend_(backend), memory_(std::move(memory)) {}

  const kernels::Backend& backend_;
  std::unique_ptr<kernels::Buffer> memory_;
  bool pinned_ = false;
  std::unique_ptr<PagePool> pages_;
  std::atomic<uint64_t> listed_{0}, copied_{0};
};

}  // namespace spl::engine
