// A decode worker's room for one prompt that is still to come: a request is checked, what it needs is counted, and its
// pages are taken. No RPC, no time: tickets get those from the service.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "services/decode/ticket_table.h"
#include "services/engine/cache/page_pool.h"
#include "services/engine/model/model.h"
#include "spl/v1/decode.pb.h"

namespace spl::decode {

// Where pages are reserved. All outlive the call.
struct ReservationPools {
  engine::PagePool& pool;
  engine::PagePool* landing = nullptr;  // host memory in front of a pool on a GPU; null: prompts arrive in the pool
};

// A ticket with its pages: KV of the prompt, spare pages for heads that may be restored, what a choice of tokens keeps,
// and landing pages where all of them are free. Without an id, an expiry, a writer or a stream. Any thread.
//
// Where the pages that a choice of tokens keeps find no room, and those of the KV do, the ticket is for a sequence that
// attends to everything; `response` then names the method. `response` gets the pages and holes, too.
// InvalidArgument: the field and its range, or a prompt that is larger than the pool. ResourceExhausted: no pages now.
// FailedPrecondition, Unimplemented: the policy or the decode method, as CheckRecoveryPolicy and MakeTokenSelector say.
absl::StatusOr<std::unique_ptr<Ticket>> MakeReservation(const v1::ReserveRequest& request, const engine::Model& model,
                                                        const ReservationPools& pools, v1::Ticket& response);

}  // namespace spl::decode
