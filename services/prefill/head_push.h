// Sends pages of a lease to a decode worker that restores heads (Prefill.FetchHeads).
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "services/prefill_work/head_lease_table.h"
#include "services/prefill_work/peer_table.h"
#include "services/prefill_work/push_worker.h"
#include "services/prefill_work/ticket_guard.h"
#include "spl/v1/prefill.pb.h"

namespace spl::prefill {

// The right to write a fetch's pages; the decode worker can ask for it by the fetch's id, as for a ticket's. `hold` may
// be null: it cannot be asked for.
struct HeadFetchHold {
  std::unique_ptr<TicketGuard::Hold> hold;
  TicketGuard::CancelFlag cancelled = std::make_shared<std::atomic<bool>>(false);
};

// Writes the pages that `request` names. Calls `done` once, with their checksums, when they are in the decode worker's
// memory. Returns at once; writes start on the push thread, none after `deadline`. Errors, returned or passed to
// `done`: InvalidArgument: a head that is not kept, another number of pages, or a page outside the peer's pool.
// ResourceExhausted: too much is queued. DeadlineExceeded, Unavailable: writes may still be in flight.
absl::Status PushHeads(PushWorker& worker, std::shared_ptr<const Peer> peer, std::shared_ptr<const LeasedHeads> heads,
                       HeadFetchHold hold, const v1::FetchHeadsRequest& request,
                       std::chrono::steady_clock::time_point deadline,
                       std::function<void(absl::StatusOr<std::vector<uint32_t>>)> done);

}  // namespace spl::prefill
