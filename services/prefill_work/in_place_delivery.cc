#include "services/prefill_work/in_place_delivery.h"

#include <utility>

#include "services/base/status.h"

namespace spl::prefill {

InPlaceDelivery::InPlaceDelivery(PushWorker& worker, std::shared_ptr<const Peer> peer, const v1::Ticket& ticket,
                                 std::shared_ptr<engine::SharedPool> shared, std::unique_ptr<TicketGuard::Hold> hold,
                                 std::string request_id)
    : PromptDelivery(worker, std::move(peer), ticket, std::move(hold), std::move(request_id)),
      shared_(std::move(shared)),
      ticket_id_(RandomId::FromBytes(ticket.ticket_id()).value_or(RandomId())) {}

void InPlaceDelivery::DoCommit() {
  commit_.set_in_place(true);
  shared_->Give(ticket_id_, kv_);
  SendCommit();
}

void InPlaceDelivery::DoAbort(const absl::Status& why, std::function<void()> done) {
  EndPushSpan(why);
  hold_->EndFlushed();  // nothing was written
  SendRelease(MessageOf(why), true, [self = shared_from_this(), this, done = std::move(done)] {
    End();
    done();
  });
}

void InPlaceDelivery::OnRefused() { shared_->Take(ticket_id_); }

}  // namespace spl::prefill
