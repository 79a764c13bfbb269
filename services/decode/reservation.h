// A decode worker's KV reservation for one prompt: checks the request, computes its need, and takes the pages.
// Independent of RPCs and time; the service adds those to the ticket.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "services/decode/kept_prompts.h"
#include "services/decode/ticket_table.h"
#include "services/engine/cache/page_pool.h"
#include "services/engine/model/model.h"
#include "services/engine/runtime/shared_pool.h"
#include "spl/v1/decode.pb.h"

namespace spl::decode {

// The pools in which pages are reserved. All outlive the call.
struct ReservationPools {
  engine::SharedPool& shared;
  engine::PagePool* landing = nullptr;  // host memory in front of a pool on a GPU; null: prompts arrive in the pool
  KeptPrompts* kept = nullptr;          // prompts of conversations in the pool; null: none

  engine::PagePool& pool() const { return shared.pool(); }
};

// Returns a ticket with its pages: KV of the prompt, spare pages for heads that may be restored, compact pages for
// token selection, and landing pages if all of them are free. The ticket has no id, expiry, writer or stream yet. Any
// thread may call.
//
// If there is room for the KV but not for the compact pages, the ticket is for a sequence that attends to everything,
// and `response` names the method. `response` also gets the pages and holes.
//
// A turn of a conversation becomes an owner of the pages that are kept of its prompt, and takes new ones for the rest
// only: nothing can evict what the response says is held.
//
// A ticket whose writer shares the pool is in place: it takes no pages, because the writer computes the prompt in pages
// of the same pool, which it finds when the prompt begins. All others take theirs now, and KV that is only cached in
// the pool is evicted for them.
//
// InvalidArgument: the message names the field and its range, or the prompt is larger than the pool. ResourceExhausted:
// not enough pages now, or earlier prompts wait for pages of the pool. FailedPrecondition, Unimplemented: the policy or
// the decode method, as CheckRecoveryPolicy and MakeTokenSelector.
absl::StatusOr<std::unique_ptr<Ticket>> MakeReservation(const v1::ReserveRequest& request, const engine::Model& model,
                                                        const ReservationPools& pools, v1::Ticket& response);

}  // namespace spl::decode
