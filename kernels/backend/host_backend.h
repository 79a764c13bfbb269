// Memory and sessions, shared by the backends on the host.
#pragma once

#include <cstring>

#include "kernels/backend/backend.h"
#include "kernels/backend/host_page_sends.h"
#include "kernels/backend/host_session.h"
#include "kernels/common/host_buffer.h"
#include "kernels/common/host_memory.h"
#include "kernels/kv_copy/crc32c.h"

namespace spl::kernels {

class HostBackend : public Backend {
 public:
  absl::StatusOr<std::unique_ptr<Session>> NewSession(const SessionOptions& options) const override {
    return std::make_unique<HostSession>(options);
  }
  absl::StatusOr<DeviceMemory> Memory() const override {
    const absl::StatusOr<HostMemory> host = ReadHostMemory();
    if (!host.ok()) return host.status();
    return DeviceMemory{.free_bytes = host->available_bytes, .total_bytes = host->total_bytes};
  }
  absl::StatusOr<std::unique_ptr<Buffer>> Allocate(size_t bytes) const override { return AllocateHostBuffer(bytes); }
  using Backend::Copy;
  absl::Status Copy(CopyKind, std::span<const CopyOp> ops) const override {
    for (const CopyOp& op : ops) {
      if (op.bytes > 0) std::memcpy(op.to, op.from, op.bytes);
    }
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> NewGroup(
      std::span<const Backend* const> ranks) const override {
    return MakeHostGroup(static_cast<int>(ranks.size()), kCollectiveTimeout);
  }
  absl::Status PageChecksums(const KvPoolView& pool, std::span<const int32_t> pages, uint32_t* out) const override {
    for (size_t i = 0; i < pages.size(); ++i) out[i] = Crc32cExtend(0, pool.k(pages[i]), pool.page_bytes());
    return absl::OkStatus();
  }
};

}  // namespace spl::kernels
