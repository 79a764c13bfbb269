// Lists of writes or reads: checked against the remote memory, and shortened before they are posted.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "services/transport/kv_transport.h"

namespace spl::transport {

// Fields common to both kinds of op. The channel knows which kind a list is, and never writes through `local` of a put.
struct RmaOp {
  std::byte* local = nullptr;
  uint64_t remote_offset = 0;
  size_t bytes = 0;
};
std::vector<RmaOp> ToRmaOps(const std::vector<PutOp>& ops);
std::vector<RmaOp> ToRmaOps(const std::vector<GetOp>& ops);

// InvalidArgument names the first op that leaves [0, remote_size), or has bytes but no local address.
absl::Status CheckRmaOps(const std::vector<RmaOp>& ops, uint64_t remote_size);

// Joins neighbours that are contiguous on both sides and drops empty ops; keeps the order. Posting costs the same for
// 16 KiB as for 16 MiB, and a sequence's pages are usually adjacent.
std::vector<RmaOp> CoalesceRmaOps(std::vector<RmaOp> ops);

}  // namespace spl::transport
