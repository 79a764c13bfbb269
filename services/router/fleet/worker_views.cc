#include "services/router/fleet/worker_views.h"

namespace spl::router {

PrefillView WorkerView(const v1::PrefillInfo& info) {
  PrefillView view{.worker_id = info.worker_id(),
                   .epoch = info.epoch(),
                   .draining = info.draining(),
                   .structured_output = info.structured_output()};
  view.TakeLoad(info);
  return view;
}

DecodeView WorkerView(const v1::DecodeInfo& info) {
  return {.worker_id = info.worker_id(),
          .epoch = info.epoch(),
          .sequences = info.running_sequences() + info.reserved_tickets(),
          .running = info.running_sequences(),
          .max_sequences = info.max_sequences(),
          .free_pages = info.free_pages(),
          .total_pages = info.total_pages(),
          .step_seconds = info.step_seconds(),
          .max_sequence_tokens = info.max_sequence_tokens(),
          .kv_bytes_per_token = info.kv_bytes_per_token(),
          .draining = info.draining(),
          .replays = info.replays(),
          .structured_output = info.structured_output()};
}

}  // namespace spl::router
