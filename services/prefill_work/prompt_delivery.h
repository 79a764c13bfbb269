// How a computed prompt gets to its decode worker: what every way there has in common.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "services/base/trace.h"
#include "services/engine/engine.h"
#include "services/prefill_work/peer_table.h"
#include "services/prefill_work/push_worker.h"
#include "services/prefill_work/ticket_guard.h"
#include "spl/v1/decode.pb.h"

namespace spl::prefill {

// The delivery of one prompt, by its ticket. Call OnLayer any number of times, then Commit or Abort once; all on the
// engine thread, which only enqueues: the work runs on the push worker's thread. The push worker counts the delivery
// from its construction to its end.
class PromptDelivery : public std::enable_shared_from_this<PromptDelivery> {
 public:
  virtual ~PromptDelivery() = default;

  // Call first. Spans of the work after the last layer become children of `trace`. The tracer must outlive this.
  void SetTrace(const Tracer& tracer, const TraceContext& trace) {
    tracer_ = &tracer;
    trace_ = trace;
  }
  virtual void OnLayer(const engine::LayerReady& ready) = 0;
  // Makes the request call OnLayer.
  void FollowLayers(engine::PrefillRequest& request);
  // Call when everything was computed: delivers what is left, then commits at the decode worker with the first tokens.
  // Keeps the KV until then.
  void Commit(const engine::PrefillOutcome& outcome);
  // Call after a failure: makes sure that no write is in flight, tells the decode worker, then calls `done`.
  void Abort(std::shared_ptr<const engine::SequenceKv> kv, const absl::Status& why, std::function<void()> done);

  // Bytes that are moved. From Commit on they include restored heads and exclude what the prompt leaves out.
  virtual int64_t num_bytes() const = 0;
  virtual std::string carrier() const = 0;
  const Peer& peer() const { return *peer_; }

 protected:
  PromptDelivery(PushWorker& worker, std::shared_ptr<const Peer> peer, const v1::Ticket& ticket,
                 std::unique_ptr<TicketGuard::Hold> hold, std::string request_id);

  // Layers for which OnLayer may be called together (PrefillRequest::layers_a_fence).
  virtual int32_t layers_at_once() const { return 1; }
  // On the engine thread, in front of DoCommit.
  virtual void NoteOutcome(const engine::PrefillOutcome&) {}
  // On the push thread. DoCommit ends with SendCommit or DoAbort, DoAbort with End.
  virtual void DoCommit() = 0;
  virtual void DoAbort(const absl::Status& why, std::function<void()> done) = 0;
  // The decode worker did not take the commit: it will not come for the KV. Any thread.
  virtual void OnRefused() {}
  // No write of this delivery was flushed. Any thread.
  void EndUnflushed();

  void EndPushSpan(const absl::Status& why);
  // Calls Commit at the decode worker with commit_, and ends this.
  void SendCommit();
  // Tells the decode worker that the ticket is not needed; then calls `done`.
  void SendRelease(const std::string& reason, bool writer_quiet, std::function<void()> done);
  // Lets go of the KV; the push worker counts this no longer.
  void End();

  PushWorker& worker_;
  const std::shared_ptr<const Peer> peer_;
  const v1::Ticket ticket_;
  const std::unique_ptr<TicketGuard::Hold> hold_;
  const std::string request_id_;

  // Used by the push thread only, from Commit or Abort on.
  v1::CommitRequest commit_;
  std::shared_ptr<const engine::SequenceKv> kv_;

 private:
  void EndCommit(const absl::Status& status);  // the decode worker's answer; any thread

  const Tracer* tracer_ = &Tracer::None();
  TraceContext trace_;
  std::chrono::steady_clock::time_point computed_;  // when the last layer was complete
  Span push_span_, commit_span_;                    // from then until the commit is answered; the call itself
};

}  // namespace spl::prefill
