#include "services/transport/rma_ops.h"

#include "services/base/status.h"

namespace spl::transport {

std::vector<RmaOp> ToRmaOps(const std::vector<PutOp>& ops) {
  std::vector<RmaOp> same;
  same.reserve(ops.size());
  for (const PutOp& op : ops) same.push_back({const_cast<std::byte*>(op.local), op.remote_offset, op.bytes});
  return same;
}

std::vector<RmaOp> ToRmaOps(const std::vector<GetOp>& ops) {
  std::vector<RmaOp> same;
  same.reserve(ops.size());
  for (const GetOp& op : ops) same.push_back({op.local, op.remote_offset, op.bytes});
  return same;
}

absl::Status CheckRmaOps(const std::vector<RmaOp>& ops, uint64_t remote_size) {
  for (size_t i = 0; i < ops.size(); ++i) {
    const RmaOp& op = ops[i];
    if (op.remote_offset > remote_size || op.bytes > remote_size - op.remote_offset) {
      return InvalidArgument("op {} covers {} bytes at offset {}, outside the remote memory of {} bytes", i, op.bytes,
                             op.remote_offset, remote_size);
    }
    if (op.bytes > 0 && op.local == nullptr) return InvalidArgument("op {} has no local address", i);
  }
  return absl::OkStatus();
}

std::vector<RmaOp> CoalesceRmaOps(std::vector<RmaOp> ops) {
  size_t kept = 0;
  for (const RmaOp& op : ops) {
    if (op.bytes == 0) continue;
    RmaOp* const last = kept > 0 ? &ops[kept - 1] : nullptr;
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
