#include "services/transport/put_ops.h"

#include "services/base/status.h"

namespace spl::transport {

absl::Status CheckPutOps(const std::vector<PutOp>& ops, uint64_t remote_size) {
  for (size_t i = 0; i < ops.size(); ++i) {
    const PutOp& op = ops[i];
    if (op.remote_offset > remote_size || op.bytes > remote_size - op.remote_offset) {
      return InvalidArgument("put op {} writes {} bytes at offset {}, outside the remote memory of {} bytes", i,
                             op.bytes, op.remote_offset, remote_size);
    }
    if (op.bytes > 0 && op.local == nullptr) return InvalidArgument("put op {} has no local address", i);
  }
  return absl::OkStatus();
}

std::vector<PutOp> CoalescePutOps(std::vector<PutOp> ops) {
  size_t kept = 0;
  for (const PutOp& op : ops) {
    if (op.bytes == 0) continue;
    PutOp* const last = kept > 0 ? &ops[kept - 1] : nullptr;
    if (last != nullptr && last->local + last->bytes == op.local &&
        last->remote_offset + last->bytes == op.remote_offset) {
      last->bytes += op.bytes;
    } else {
      ops[kept++] = op;
    }
  }
  ops.resize(kept);
  return ops;
}

}  // namespace spl::transport
