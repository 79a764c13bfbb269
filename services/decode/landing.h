// Takes over a prompt's KV that a prefill worker has written into a ticket's pages: applies the commit and checks every
// page.
#pragma once

#include "absl/status/status.h"
#include "services/decode/reservation.h"
#include "services/decode/ticket_table.h"
#include "services/engine/model/model.h"
#include "spl/v1/decode.pb.h"

namespace spl::decode {

// REQUIRES: the ticket is in state kLanding, so that no other thread touches its pages. The writer flushed before it
// committed, so that all bytes are in the pool or in the landing pages. Afterwards the ticket describes the KV that
// arrived, all of it in the pool: a shorter prompt (`only`), fewer positions (`kept`), more heads (`restored_heads`).
//
// In place (ticket.in_place) the KV is what was handed over within the process; nothing is copied or checked.
//
// DataLoss: a page differs from the one that was sent; sets `damaged`. InvalidArgument: the commit contradicts the
// ticket or itself. Cost: a checksum of all pages, on the pool's device.
absl::Status LandPrompt(Ticket& ticket, const v1::CommitRequest& request, const ReservationPools& pools,
                        const engine::Model& model, bool& damaged);

}  // namespace spl::decode
