// The CPU backend in the clothes of a device: its memory may only be reached through Copy, its page checksums and its
// handles. What the workers do for a GPU is tested with it on machines that have none.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <string>

#include "kernels/common/backend.h"

namespace spl::test {

class FakeDeviceBackend : public kernels::Backend {
 public:
  explicit FakeDeviceBackend(const kernels::CpuBackendOptions& options = {}) : cpu_(kernels::MakeCpuBackend(options)) {}

  std::atomic<bool> lost{false};  // from here on products fail as on a GPU whose context is gone

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
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> Allocate(size_t bytes) const override {
    return cpu_->Allocate(bytes);
  }
  absl::StatusOr<std::unique_ptr<kernels::LinearWeight>> PackLinear(const kernels::WeightView& w) const override {
    return cpu_->PackLinear(w);
  }
  absl::Status Linear(const kernels::KernelContext& ctx, const kernels::LinearArgs& a) const override {
    if (lost) return absl::DataLossError("fake device: an illegal memory access was encountered");
    return cpu_->Linear(ctx, a);
  }
  absl::Status RmsNorm(const kernels::KernelContext& ctx, const kernels::RmsNormArgs& a) const override {
    return cpu_->RmsNorm(ctx, a);
  }
  absl::Status SiluMul(const kernels::KernelContext& ctx, const kernels::SiluMulArgs& a) const override {
    return cpu_->SiluMul(ctx, a);
  }
  absl::Status GatherRows(const kernels::KernelContext& ctx, const kernels::GatherRowsArgs& a) const override {
    return cpu_->GatherRows(ctx, a);
  }
  absl::Status RopeWriteKv(const kernels::KernelContext& ctx, const kernels::RopeWriteKvArgs& a) const override {
    return cpu_->RopeWriteKv(ctx, a);
  }
  absl::Status PrefillAttention(const kernels::KernelContext& ctx,
                                const kernels::PrefillAttentionArgs& a) const override {
    return cpu_->PrefillAttention(ctx, a);
  }
  absl::Status DecodeAttention(const kernels::KernelContext& ctx,
                               const kernels::DecodeAttentionArgs& a) const override {
    return cpu_->DecodeAttention(ctx, a);
  }
  absl::Status ListCandidates(const kernels::KernelContext& ctx, const kernels::ListCandidatesArgs& a) const override {
    return cpu_->ListCandidates(ctx, a);
  }
  absl::Status SelectTokens(const kernels::KernelContext& ctx, const kernels::SelectTokensArgs& a) const override {
    return cpu_->SelectTokens(ctx, a);
  }
  absl::Status SelectLines(const kernels::KernelContext& ctx, const kernels::SelectLinesArgs& a) const override {
    return cpu_->SelectLines(ctx, a);
  }
  absl::Status TopTokens(const kernels::KernelContext& ctx, const kernels::TopTokensArgs& a) const override {
    return cpu_->TopTokens(ctx, a);
  }
  absl::Status ChooseByQueryWindow(const kernels::KernelContext& ctx,
                                   const kernels::QueryWindowArgs& a) const override {
    return cpu_->ChooseByQueryWindow(ctx, a);
  }
  absl::Status FuseRows(const kernels::KernelContext& ctx, const kernels::FuseRowsArgs& a) const override {
    return cpu_->FuseRows(ctx, a);
  }
  absl::Status PageBoundScores(const kernels::KernelContext& ctx,
                               const kernels::PageBoundScoresArgs& a) const override {
    return cpu_->PageBoundScores(ctx, a);
  }
  absl::Status Argmax(const kernels::KernelContext& ctx, const kernels::ArgmaxArgs& a) const override {
    return cpu_->Argmax(ctx, a);
  }
  absl::Status AlignCopy(const kernels::KernelContext& ctx, const kernels::AlignCopyArgs& a) const override {
    return cpu_->AlignCopy(ctx, a);
  }
  absl::Status ColumnScores(const kernels::KernelContext& ctx, const kernels::ColumnScoresArgs& a) const override {
    return cpu_->ColumnScores(ctx, a);
  }
  absl::Status ScatterRows(const kernels::KernelContext& ctx, const kernels::ScatterRowsArgs& a) const override {
    return cpu_->ScatterRows(ctx, a);
  }
  absl::Status RowNorms(const kernels::KernelContext& ctx, const kernels::RowNormsArgs& a) const override {
    return cpu_->RowNorms(ctx, a);
  }
  absl::Status PoolScores(const kernels::KernelContext& ctx, const kernels::PoolScoresArgs& a) const override {
    return cpu_->PoolScores(ctx, a);
  }
  absl::Status TopK(const kernels::KernelContext& ctx, const kernels::TopKArgs& a) const override {
    return cpu_->TopK(ctx, a);
  }
  absl::Status ValueDeviation(const kernels::KernelContext& ctx, const kernels::ValueDeviationArgs& a) const override {
    return cpu_->ValueDeviation(ctx, a);
  }

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

  const std::unique_ptr<kernels::Backend> cpu_;
};

}  // namespace spl::test
