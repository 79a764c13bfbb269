// Takes over a prompt's KV that a prefill worker has written into a ticket's pages: what it says about them is applied,
// and every page is checked.
#pragma once

#include "absl/status/status.h"
#include "services/decode/reservation.h"
#include "services/decode/ticket_table.h"
#include "services/engine/model/model.h"
#include "spl/v1/decode.pb.h"

namespace spl::decode {

// REQUIRES: the ticket is in state kLanding, so that nobody else touches its pages; the writer has flushed before it
// committed, so that all bytes are in the pool or in the landing pages. Afterwards the ticket is for what came: a
// shorter prompt (`only`), fewer positions (`kept`), more heads (`restored_heads`), all of it in the pool.
// Costs a checksum of all pages, on the pool's device. DataLoss: a page is not what was sent, and `damaged` is set.
// InvalidArgument: the commit contradicts the ticket or itself.
absl::Status LandPrompt(Ticket& ticket, const v1::CommitRequest& request, const ReservationPools& pools,
                        const engine::Model& model, bool& damaged);

}  // namespace spl::decode
