// The receipt of a prompt: what was reused, fetched and computed, and to whom it went (docs/api.md).
#pragma once

#include "services/engine/engine.h"
#include "services/prefill_work/prompt_delivery.h"
#include "spl/v1/common.pb.h"
#include "spl/v1/decode.pb.h"

namespace spl::prefill {

void FillReceipt(const engine::PrefillOutcome& outcome, v1::Receipt& receipt);
void FillDelivery(const PromptDelivery& delivery, const v1::Ticket& ticket, v1::Receipt& receipt);

}  // namespace spl::prefill
