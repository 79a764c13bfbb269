#include "services/router/fleet/worker_views.h"

namespace spl::router {
namespace {

// A view of what PrefillInfo and LocalPrefill both say.
template <typename Info>
PrefillView PlaceView(const Info& info) {
  return {.worker_id = info.worker_id(),
          .queued_tokens = info.queued_tokens(),
          .tokens_per_s = info.prefill_tokens_per_s(),
          .first_tokens_per_s = info.first_tokens_per_s(),
          .pair_cost = info.pair_cost(),
          .max_prompt_tokens = info.max_prompt_tokens()};
}

}  // namespace

PrefillView WorkerView(const v1::PrefillInfo& info) {
  PrefillView view = PlaceView(info);
  view.epoch = info.epoch();
  view.free_pages = info.free_pages();
  view.total_pages = info.total_pages();
  view.total_tokens = info.total_tokens();
  view.draining = info.draining();
  view.structured_output = info.structured_output();
  return view;
}

PrefillView LocalWorkerView(const v1::DecodeInfo& info) {
  const v1::LocalPrefill& local = info.local_prefill();
  PrefillView view = PlaceView(local);
  view.epoch = info.epoch();
  view.draining = info.draining();
  view.reads_store = local.has_store();
  view.structured_output = info.structured_output();
  view.local = PrefillView::Local{
      .decode_id = info.worker_id(), .max_new_tokens = local.max_new_tokens(), .slice_tokens = local.slice_tokens()};
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
