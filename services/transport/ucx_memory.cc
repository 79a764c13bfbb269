#include "services/transport/ucx_memory.h"

#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "services/base/status.h"
#include "services/transport/rkey_frame.h"
#include "services/transport/ucx_runtime.h"

namespace spl::transport {

UcxMemory::~UcxMemory() {
  if (handle_ != nullptr && !worker_.Run([&] { ucp_mem_unmap(worker_.context(), handle_); }).ok()) {
    ucp_mem_unmap(worker_.context(), handle_);  // the progress thread has ended, so the context has no other user
  }
}

absl::Status UcxMemory::Map(size_t bytes, std::unique_ptr<kernels::Buffer> own) {
  own_ = std::move(own);
  absl::Status status;
  SPLICE_RETURN_IF_ERROR(worker_.Run([&] { status = MapOnThread(bytes); }));
  SPLICE_RETURN_IF_ERROR(status);
  std::memset(data_, 0, size_);  // also gives every page its memory now, not under the first request
  return absl::OkStatus();
}

absl::Status UcxMemory::MapOnThread(size_t bytes) {
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS;
  params.address = own_ == nullptr ? nullptr : own_->data();
  params.length = bytes;
  params.flags = own_ == nullptr ? UCP_MEM_MAP_ALLOCATE : 0;
  const std::string what = fmt::format("cannot allocate {} bytes of KV memory", bytes);
  SPLICE_RETURN_IF_ERROR(StatusFromUcs(ucp_mem_map(worker_.context(), &params, &handle_), what));
  ucp_mem_attr_t attributes{};
  attributes.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS | UCP_MEM_ATTR_FIELD_LENGTH;
  SPLICE_RETURN_IF_ERROR(StatusFromUcs(ucp_mem_query(handle_, &attributes), what));
  data_ = static_cast<std::byte*>(attributes.address);
  size_ = bytes;
  void* packed = nullptr;
  size_t packed_bytes = 0;
  SPLICE_RETURN_IF_ERROR(StatusFromUcs(ucp_rkey_pack(worker_.context(), handle_, &packed, &packed_bytes), what));
  rkey_ = FrameRkey({std::string(static_cast<const char*>(packed), packed_bytes), local_port_});
  ucp_rkey_buffer_release(packed);
  return absl::OkStatus();
}

}  // namespace spl::transport
