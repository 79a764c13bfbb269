// Lists of writes: checked against the remote memory, and made short before they are posted.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "services/transport/kv_transport.h"

namespace spl::transport {

// InvalidArgument naming the first op that leaves [0, remote_size), or has bytes but no local address.
absl::Status CheckPutOps(const std::vector<PutOp>& ops, uint64_t remote_size);

// Joins neighbours that continue each other on both sides and drops empty ops, keeping the order. Posting costs the
// same for 16 KiB as for 16 MiB, and a sequence's pages are usually adjacent.
std::vector<PutOp> CoalescePutOps(std::vector<PutOp> ops);

}  // namespace spl::transport
