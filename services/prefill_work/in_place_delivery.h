// Delivery within a process: the decode worker goes on in the pages in which the prompt was computed.
#pragma once

#include <memory>
#include <string>

#include "services/engine/runtime/shared_pool.h"
#include "services/prefill_work/prompt_delivery.h"

namespace spl::prefill {

// For a ticket that is in_place. Moves no byte and checks none; cost: a reference for each page of the prompt. The
// decode worker leaves out itself what the request's method leaves out.
class InPlaceDelivery final : public PromptDelivery {
 public:
  InPlaceDelivery(PushWorker& worker, std::shared_ptr<const Peer> peer, const v1::Ticket& ticket,
                  std::shared_ptr<engine::SharedPool> shared, std::unique_ptr<TicketGuard::Hold> hold,
                  std::string request_id);

  void OnLayer(const engine::LayerReady&) override {}
  int64_t num_bytes() const override { return 0; }
  std::string carrier() const override { return "in place"; }

 private:
  void DoCommit() override;
  void DoAbort(const absl::Status& why, std::function<void()> done) override;
  void OnRefused() override;

  const std::shared_ptr<engine::SharedPool> shared_;
  const RandomId ticket_id_;
};

}  // namespace spl::prefill
