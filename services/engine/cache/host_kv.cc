#include "services/engine/cache/host_kv.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "kernels/common/host_buffer.h"
#include "services/base/check.h"
#include "services/base/status.h"

namespace spl::engine {

absl::StatusOr<std::unique_ptr<HostKv>> HostKv::Create(const Model& model, size_t bytes) {
  SPLICE_ASSIGN_OR_RETURN(auto memory, kernels::AllocateHostBuffer(bytes / model.page_bytes() * model.page_bytes()));
  return Over(model, std::move(memory));
}

absl::StatusOr<std::unique_ptr<HostKv>> HostKv::Over(const Model& model, std::unique_ptr<kernels::Buffer> memory) {
  const size_t bytes = memory->size();
  const auto num_pages =
      static_cast<int64_t>(std::min<size_t>(bytes / model.page_bytes(), std::numeric_limits<int32_t>::max()));
  if (num_pages == 0)
    return InvalidArgument("host memory for KV of {} bytes is less than a page of {}", bytes, model.page_bytes());
  const kernels::Backend& backend = model.rank(0).backend();
  auto* const base = static_cast<std::byte*>(memory->data());
  auto host = std::unique_ptr<HostKv>(new HostKv(backend, std::move(memory)));
  // For all devices of this process: it is portable.
  if (absl::Status pinned = backend.PinHost(base, bytes); !pinned.ok())
    return Errorf(absl::StatusCode::kResourceExhausted, "page-locking {} bytes of host memory for KV: {}", bytes,
                  MessageOf(pinned));
  host->pinned_ = true;
  host->pages_ = std::make_unique<PagePool>(kernels::KvPoolView{.base = base,
                                                                .dtype = model.kv_dtype(),
                                                                .head_dim = model.config().head_dim,
                                                                .num_pages = static_cast<int32_t>(num_pages)});
  return host;
}

HostKv::~HostKv() {
  SPLICE_CHECK(pages_ == nullptr || pages_->num_free() == pages_->num_pages(), "sequences have pages in host memory");
  if (pinned_) backend_.UnpinHost(memory_->data());
}

}  // namespace spl::engine
