// Pushes one request's KV into the pages of its ticket, layer by layer while later layers are being computed.
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
#include "services/prefill_work/head_lease_table.h"
#include "services/prefill_work/page_sender.h"
#include "services/prefill_work/peer_table.h"
#include "services/prefill_work/ticket_guard.h"
#include "spl/v1/decode.pb.h"

namespace spl::prefill {

// InvalidArgument: the ticket is not for a sequence of this model, for this number of tokens, and for pages inside the
// peer's pool; or it keeps less than the head classes of the request do (`classes`; null: none).
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

// Pages that are kept for the decode worker, announced with the commit.
struct PushLease {
  std::shared_ptr<const LeasedHeads> heads;
  v1::HeadLease lease;            // without the summaries, which the push thread makes
  std::function<void()> release;  // called if the decode worker will never hear of the lease; any thread
};

// The push of one request. Call OnLayer any number of times, then Commit or Abort once. Checksums and writes run on the
// push worker's thread, so that the engine thread only enqueues. No write starts after the ticket's lease has run out.
//
// Not sent: pages in a hole of the ticket, except those of restored heads, which are sent with the commit; pages
// without a kept token (LayerReady::kept); pages past the end of a shortened prompt (PrefillOutcome::only), which the
// decode worker takes back with the commit.
class KvPush : public std::enable_shared_from_this<KvPush> {
 public:
  // ResourceExhausted: the only path to this decode worker leads through landing pages, and the ticket has none.
  // `classes`: head classes of the request; null: none. `hold` ends when the last write has been flushed.
  static absl::StatusOr<std::shared_ptr<KvPush>> Create(PushWorker& worker, std::shared_ptr<const Peer> peer,
                                                        const v1::Ticket& ticket, const engine::Model& model,
                                                        std::shared_ptr<const engine::StreamClasses> classes,
                                                        std::unique_ptr<TicketGuard::Hold> hold,
                                                        std::string request_id);

  // Call first. Spans of the work after the last layer become children of `trace`. The tracer must outlive this.
  void SetTrace(const Tracer& tracer, const TraceContext& trace) {
    tracer_ = &tracer;
    trace_ = trace;
  }
  void OnLayer(const engine::LayerReady& ready);
  // Call when everything was computed: flushes, then commits at the decode worker with the first tokens. Keeps the KV
  // until then. `lease` may be null.
  void Commit(const engine::PrefillOutcome& outcome, std::unique_ptr<PushLease> lease = nullptr);
  // Call after a failure: makes sure that no write is in flight, tells the decode worker, then calls `done`.
  void Abort(std::shared_ptr<const engine::SequenceKv> kv, const absl::Status& why, std::function<void()> done);

  // Bytes of the whole push. From Commit on they include restored heads and exclude pages without a kept token.
  int64_t num_bytes() const;
  const Peer& peer() const { return *peer_; }

 private:
  KvPush(PushWorker& worker, std::shared_ptr<const Peer> peer, const v1::Ticket& ticket, const engine::Model& model,
         std::shared_ptr<const engine::StreamClasses> classes, std::unique_ptr<TicketGuard::Hold> hold,
         std::string request_id);
  // Pages of one stream.
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

  // Used by the push thread only.
  const std::unique_ptr<PageSender> sender_;
  // [num_streams]: index of the stream's first kept page in the ticket's list.
  std::vector<int32_t> first_target_;
  std::vector<uint32_t> crc_;  // [layer][kv_head]: checksums joined page by page
  v1::CommitRequest commit_;
  std::shared_ptr<PushLease> lease_;  // until it is announced
  std::shared_ptr<const engine::SequenceKv> kv_;
  std::chrono::steady_clock::time_point computed_;  // when the last layer was complete
  Span push_span_, commit_span_;                    // from then until the commit is answered; the call itself

  // Pages that the commit adds, and pages that were left out; written before the commit is queued.
  int64_t restored_pages_ = 0, left_out_pages_ = 0;
  mutable std::mutex mutex_;  // guards status_
  absl::Status status_;
};

// Owns the push thread of a prefill worker. Any thread may enqueue.
class PushWorker {
 public:
  // `on_pages_back` runs when a push has released its pages.
  PushWorker(const engine::Model& model, Metrics& metrics, std::function<void()> on_pages_back);
  ~PushWorker();

  // False: the queue is full or closed.
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
