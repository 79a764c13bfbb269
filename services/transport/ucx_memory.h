// Memory that is registered with UCX: what peers write and read (kv_transport.h).
#pragma once

#include <ucp/api/ucp.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "kernels/common/host_buffer.h"
#include "services/transport/kv_transport.h"
#include "services/transport/ucx_worker.h"

namespace spl::transport {

class UcxMemory final : public RegisteredMemory {
 public:
  // local_port: of the transport's listener for peers that map the memory; 0: none maps it. worker outlives the memory.
  UcxMemory(UcxWorker& worker, uint16_t local_port) : worker_(worker), local_port_(local_port) {}
  ~UcxMemory() override;
  UcxMemory(const UcxMemory&) = delete;
  UcxMemory& operator=(const UcxMemory&) = delete;

  // Once, before anything else. own: memory of at least so many bytes; null: UCX allocates it, so that a peer on this
  // host can map it. Cost: touches every page.
  absl::Status Map(size_t bytes, std::unique_ptr<kernels::Buffer> own);
  std::byte* data() const override { return data_; }
  size_t size() const override { return size_; }
  const std::string& packed_rkey() const override { return rkey_; }

 private:
  absl::Status MapOnThread(size_t bytes);

  UcxWorker& worker_;
  const uint16_t local_port_;
  std::unique_ptr<kernels::Buffer> own_;
  ucp_mem_h handle_ = nullptr;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  std::string rkey_;
};

}  // namespace spl::transport
