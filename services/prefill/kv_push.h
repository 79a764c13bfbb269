// The push of one request's KV into the pages of its ticket, layer by layer while the rest is being computed.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "kernels/kv_copy/crc32c_shifter.h"
#include "services/base/bounded_queue.h"
#include "services/base/metrics.h"
#include "services/base/trace.h"
#include "services/engine/engine.h"
#include "services/prefill/head_lease_table.h"
#include "services/prefill/page_sender.h"
#include "services/prefill/peer_table.h"
#include "services/prefill/ticket_guard.h"
#include "spl/v1/decode.pb.h"

namespace spl::prefill {

// InvalidArgument when the ticket does not describe a sequence of this model, this many tokens, and pages inside the
// peer's pool, or keeps less than the head classes (null: none) of the request do.
absl::Status ValidateTicket(const v1::Ticket& ticket, const v1::DecodeEndpoint& endpoint, const engine::Model& model,
                            int64_t num_tokens, const engine::StreamClasses* classes);

struct PushMetrics {
  explicit PushMetrics(Metrics& metrics);
  prometheus::Counter& bytes_out;
  prometheus::Counter& failures_lost;
  prometheus::Counter& failures_lease;
  prometheus::Counter& failures_commit;
  prometheus::Histogram& seconds;
};

class PushWorker;

// What is kept for the decode worker, and told to it with the commit.
struct PushLease {
  std::shared_ptr<const LeasedHeads> heads;
  v1::HeadLease lease;            // but for the summaries, which the push thread makes
  std::function<void()> release;  // the decode worker will never hear of it; any thread
};

// One request. Calls come in this order: OnLayer*, then Commit or Abort once. Checksums and writes happen on the push
// worker's thread, so that the engine thread only enqueues. No write starts after the ticket's lease has run out.
// What lies in a hole of the ticket is not sent, but that of restored heads, when they are known: with the commit; nor
// are pages without a kept token (LayerReady::kept), or behind a prompt of which less is left
// (PrefillOutcome::only), whose places the decode worker takes back with the commit.
class KvPush : public std::enable_shared_from_this<KvPush> {
 public:
  // ResourceExhausted: the only way to this decode worker leads through landing pages, and the ticket has none.
  // `classes`: of the request, null: none. `hold`: ends when the last write has been flushed.
  static absl::StatusOr<std::shared_ptr<KvPush>> Create(PushWorker& worker, std::shared_ptr<const Peer> peer,
                                                        const v1::Ticket& ticket, const engine::Model& model,
                                                        std::shared_ptr<const engine::StreamClasses> classes,
                                                        std::unique_ptr<TicketGuard::Hold> hold,
                                                        std::string request_id);

  // Before the first call: spans of what is behind the last layer are children of `trace`. The tracer outlives this.
  void SetTrace(const Tracer& tracer, const TraceContext& trace) {
    tracer_ = &tracer;
    trace_ = trace;
  }
  void OnLayer(const engine::LayerReady& ready);
  // Everything was computed: flush, then commit at the decode worker with the first tokens. Keeps the KV until then.
  // `lease`: may be null.
  void Commit(const engine::PrefillOutcome& outcome, std::unique_ptr<PushLease> lease = nullptr);
  // Something failed: make sure that no write is on its way, tell the decode worker, then call `done`.
  void Abort(std::shared_ptr<const engine::SequenceKv> kv, const absl::Status& why, std::function<void()> done);

  // What the whole push moves; of restored heads, and without pages that hold nothing that is kept, from Commit on.
  int64_t num_bytes() const;
  const Peer& peer() const { return *peer_; }

 private:
  KvPush(PushWorker& worker, std::shared_ptr<const Peer> peer, const v1::Ticket& ticket, const engine::Model& model,
         std::shared_ptr<const engine::StreamClasses> classes, std::unique_ptr<TicketGuard::Hold> hold,
         std::string request_id);
  // Of one stream.
  struct Pages {
    std::vector<int32_t> local;
    std::vector<uint32_t> remote;
    std::vector<uint32_t> crcs;
  };
  void AddKept(const engine::LayerReady& ready, int32_t stream, Pages& pages) const;
  engine::PageHole HoleOf(int32_t stream) const;
  void DoLayer(const engine::LayerReady& ready);
  // Starts to write the pages and fills in their checksums.
  absl::Status Send(const std::shared_ptr<const engine::SequenceKv>& kv, Pages& pages);
  absl::Status SendRestored();
  void DoCommit();
  void DoAbort(const absl::Status& why, std::function<void()> done);
  void SendCommit();
  void DescribeLease();
  void DropLease();
  void EndUnflushed();
  void SendRelease(const std::string& reason, bool writer_quiet, std::function<void()> done);
  void Fail(const absl::Status& status);
  absl::Status status() const;

  PushWorker& worker_;
  const std::shared_ptr<const Peer> peer_;
  const v1::Ticket ticket_;
  const engine::KvShape shape_;
  const size_t page_bytes_;
  const kernels::Crc32cShifter over_a_page_;
  const std::shared_ptr<const engine::StreamClasses> classes_;
  const std::unique_ptr<TicketGuard::Hold> hold_;
  const std::string request_id_;
  const std::chrono::steady_clock::time_point lease_end_;

  const Tracer* tracer_ = &Tracer::None();
  TraceContext trace_;

  // Push thread only.
  const std::unique_ptr<PageSender> sender_;
  // Where the stream's first kept page stands in the ticket's list. [num_streams]
  std::vector<int32_t> first_target_;
  std::vector<uint32_t> crc_;  // [layer][kv_head], joined page by page
  v1::CommitRequest commit_;
  std::shared_ptr<PushLease> lease_;  // until it is told
  std::shared_ptr<const engine::SequenceKv> kv_;
  std::chrono::steady_clock::time_point computed_;  // when the last layer was there
  Span push_span_, commit_span_;                    // from then until the commit is answered; the call of it

  // What the commit adds, and what was left out; written before it is queued.
  int64_t restored_pages_ = 0, left_out_pages_ = 0;
  mutable std::mutex mutex_;  // guards status_
  absl::Status status_;
};

// Owns the push thread of a prefill worker. Any thread may enqueue.
class PushWorker {
 public:
  // `on_pages_back` runs when a push has given its pages back.
  PushWorker(const engine::Model& model, Metrics& metrics, std::function<void()> on_pages_back);
  ~PushWorker();

  // False when the queue is full or closed.
  bool Enqueue(std::function<void()> task) { return tasks_.TryPush(std::move(task)); }
  void WaitIdle(std::chrono::steady_clock::time_point deadline);
  void Stop();

  const engine::Model& model() const { return model_; }
  PushMetrics& metrics() { return metrics_; }
  void PushStarted();
  void PushEnded();

 private:
  void Loop();

  const engine::Model& model_;
  PushMetrics metrics_;
  const std::function<void()> on_pages_back_;
  BoundedQueue<std::function<void()>> tasks_;
  std::mutex mutex_;  // guards num_active_
  std::condition_variable idle_;
  size_t num_active_ = 0;
  std::thread thread_;
};

}  // namespace spl::prefill
