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

template <typename S, typename View>
void AddMember(const S& slot, View* view) {
  view->address = slot.address;
  view->version = slot.version;
  view->clock = slot.clock.best();
}

}  // namespace

PrefillView WorkerView(const PrefillSlot& slot) {
  const v1::PrefillInfo& info = slot.info;
  PrefillView view = PlaceView(info);
  AddMember(slot, &view);
  view.worker = slot.worker;
  view.asked_at = slot.answered;
  view.epoch = info.epoch();
  view.free_pages = info.free_pages();
  view.total_pages = info.total_pages();
  view.total_tokens = info.total_tokens();
  view.draining = info.draining();
  view.structured_output = info.structured_output();
  return view;
}

PrefillView LocalWorkerView(const DecodeSlot& slot) {
  const v1::DecodeInfo& info = slot.info;
  const v1::LocalPrefill& local = info.local_prefill();
  PrefillView view = PlaceView(local);
  AddMember(slot, &view);
  view.worker = slot.local_prefill;
  view.asked_at = slot.answered;
  view.epoch = info.epoch();
  view.draining = info.draining();
  view.reads_store = local.has_store();
  view.structured_output = info.structured_output();
  view.local = PrefillView::Local{
      .decode_id = info.worker_id(), .max_new_tokens = local.max_new_tokens(), .slice_tokens = local.slice_tokens()};
  PeerLink& itself = view.peers[info.worker_id()];
  itself = {.decode_epoch = info.epoch(),
            .transport = "in place",
            .bytes_per_s = local.copy_bytes_per_s(),
            .write_s = local.copy_write_seconds(),
            .writer = {}};
  // Writes of the same process: nothing but the worker itself can say when they are over.
  itself.writer.set_grpc_address(info.endpoint().grpc_address());
  itself.writer.set_epoch(info.epoch());
  return view;
}

DecodeView WorkerView(const DecodeSlot& slot) {
  const v1::DecodeInfo& info = slot.info;
  DecodeView view = {.worker = slot.worker,
                     .worker_id = info.worker_id(),
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
  AddMember(slot, &view);
  return view;
}

}  // namespace spl::router
