// Prefill on a decode worker: short prompts, computed between the steps of its running sequences, so that they need not
// queue behind long prompts of the prefill pool. Engine and code are those of a prefill worker (prefill_core). It
// computes in the worker's page pool: prompts change hands in place, as in `splice serve` (docs/decisions/0008).
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "services/base/metrics.h"
#include "services/base/tls.h"
#include "services/base/trace.h"
#include "services/engine/engine.h"
#include "services/prefill_work/cache_streams.h"
#include "services/prefill_work/peer_table.h"
#include "services/prefill_work/prefill_core.h"
#include "services/prefill_work/push_worker.h"
#include "services/prefill_work/ticket_guard.h"
#include "services/transport/kv_transport.h"
#include "spl/v1/decode.pb.h"
#include "spl/v1/prefill.grpc.pb.h"

namespace spl::local_prefill {

struct LocalPrefillOptions {
  // Longest prompt to compute here, in tokens that have no KV yet; 0: none.
  uint32_t max_new_tokens = 0;
  bool enabled() const { return max_new_tokens > 0; }
  int32_t slice_tokens = 128;  // rows between two decode steps: running sequences wait for one slice
  int32_t num_threads = 0;     // 0: one per core
  std::string store_address;   // as for a prefill worker; empty: none
  bool fetch_by_cost = false;  // engine::PrefillEngineOptions::fetch_by_cost
  double session_share = 0.5;  // engine::PrefillEngineOptions::session_share and session_lease
  std::chrono::milliseconds session_lease{600'000};
  std::shared_ptr<grammar::GrammarCache> grammars;  // as for a prefill worker
};

// The decode worker that hosts it. The references, and what `reclaim` uses, must outlive it.
struct DecodeHost {
  std::shared_ptr<const engine::Model> model;
  transport::KvTransport& transport;         // for the store; the pool's host memory is registered with it
  std::shared_ptr<engine::SharedPool> pool;  // the decode engine is attached
  std::function<bool()> reclaim;             // engine::PrefillEngineOptions::reclaim
  Metrics& metrics;
  const Tracer& tracer;
  std::shared_ptr<const PeerTls> tls;  // for calls to the store
  std::string worker_id;
  uint64_t epoch = 0;
};

// Owns engine and threads. Call Stop() before destruction. Order at the end: Drain while the worker's server
// still answers (running prompts release their tickets there), then stop the server, then Stop.
class LocalPrefill {
 public:
  // InvalidArgument: a pool that does not hold a prompt of max_new_tokens and the start of its answer.
  static absl::StatusOr<std::unique_ptr<LocalPrefill>> Create(const LocalPrefillOptions& options,
                                                              const DecodeHost& host);
  ~LocalPrefill();

  // Register it with the worker's server: Prefill.Run, RevokeTicket and WatchCache.
  grpc::Service& service();

  // Call before the first Run. Connects to the worker's service, which answers reservations for this writer in place
  // from then on. `memory` is the memory that `endpoint` describes.
  absl::Status Connect(const v1::DecodeEndpoint& endpoint, std::span<std::byte> memory,
                       std::shared_ptr<grpc::Channel> decode, prefill::CommitCall commit);

  void Describe(v1::LocalPrefill& info) const;  // any thread
  void UpdateGauges();
  // Refuses new prompts, lets running ones finish until the deadline, then ends them. Returns when every Run is
  // answered.
  void Drain(std::chrono::steady_clock::time_point deadline);
  void Stop();  // idempotent

 private:
  class Service;
  LocalPrefill(const LocalPrefillOptions& options, const DecodeHost& host);

  const LocalPrefillOptions options_;
  const DecodeHost host_;
  const std::string worker_id_;
  prefill::CacheEvents cache_events_;
  std::unique_ptr<prefill::CacheStreams> cache_streams_;
  prefill::TicketGuard tickets_{{}, Clock::Real()};  // referenced by the engine and by the push thread
  std::unique_ptr<engine::PrefillEngine> engine_;
  std::span<std::byte> own_memory_;                // set by Connect
  std::shared_ptr<grpc::Channel> decode_channel_;  // set by Connect
  prefill::CommitCall commit_;                     // set by Connect
  std::unique_ptr<prefill::PeerTable> peers_;
  std::unique_ptr<prefill::PushWorker> pushes_;
  std::unique_ptr<prefill::PrefillCore> core_;
  std::unique_ptr<Service> service_;
  std::shared_ptr<const prefill::Peer> own_;  // once connected
  std::atomic<bool> draining_{false};

  prometheus::Gauge& waiting_;
};

}  // namespace spl::local_prefill
