// The Prefill gRPC service: prompts in, KV pushed to decode workers, first tokens out. Translates and delegates.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "services/base/metrics.h"
#include "services/base/trace.h"
#include "services/engine/engine.h"
#include "services/prefill_work/cache_streams.h"
#include "services/prefill_work/peer_table.h"
#include "services/prefill_work/prefill_core.h"
#include "services/prefill_work/ticket_guard.h"
#include "spl/v1/prefill.grpc.pb.h"

namespace spl::prefill {

// Borrows everything; gRPC threads only validate and enqueue.
class PrefillService final : public v1::Prefill::CallbackService {
 public:
  PrefillService(engine::PrefillEngine& engine, PeerTable& peers, PushWorker& pushes, TicketGuard& tickets,
                 CacheStreams& cache_streams, std::string worker_id, uint64_t epoch, FidelityShares fidelity,
                 std::shared_ptr<engine::SharedPool> shared, std::shared_ptr<grammar::GrammarCache> grammars,
                 Metrics& metrics, const Tracer& tracer);

  grpc::ServerUnaryReactor* SetDraining(grpc::CallbackServerContext* context, const v1::SetDrainingRequest* request,
                                        v1::SetDrainingResponse* response) override;
  grpc::ServerUnaryReactor* GetInfo(grpc::CallbackServerContext* context, const v1::GetPrefillInfoRequest* request,
                                    v1::PrefillInfo* response) override;
  grpc::ServerUnaryReactor* ConnectPeer(grpc::CallbackServerContext* context, const v1::ConnectPeerRequest* request,
                                        v1::ConnectPeerResponse* response) override;
  grpc::ServerUnaryReactor* Run(grpc::CallbackServerContext* context, const v1::PrefillRequest* request,
                                v1::PrefillResponse* response) override;
  grpc::ServerUnaryReactor* RevokeTicket(grpc::CallbackServerContext* context, const v1::RevokeTicketRequest* request,
                                         v1::RevokeTicketResponse* response) override;
  grpc::ServerUnaryReactor* Publish(grpc::CallbackServerContext* context, const v1::PublishRequest* request,
                                    v1::PublishResponse* response) override;

  grpc::ServerWriteReactor<v1::CacheEvents>* WatchCache(grpc::CallbackServerContext* context,
                                                        const v1::WatchCacheRequest* request) override;

  // The worker's gRPC address, known once its server listens; part of every KvWriter.
  void set_grpc_address(const std::string& address);
  void set_draining(bool draining) { draining_ = draining; }
  void UpdateGauges();

 private:
  using PublishCall = EngineCall<v1::PublishRequest, v1::PublishResponse>;
  absl::Status StartPublish(PublishCall& call);
  v1::KvWriter WriterOf(const Peer& peer) const;

  engine::PrefillEngine& engine_;
  PeerTable& peers_;
  PushWorker& pushes_;
  TicketGuard& tickets_;
  CacheStreams& cache_streams_;
  const std::string worker_id_;
  const uint64_t epoch_;
  const bool in_place_;  // prompts go to the decode worker of this process, in its own pool
  const Tracer& tracer_;
  PrefillCore core_;
  bool draining() const { return draining_ || draining_by_operator_; }

  std::atomic<bool> draining_{false};              // for good: the process ends
  std::atomic<bool> draining_by_operator_{false};  // until further notice
  mutable std::mutex address_mutex_;               // guards grpc_address_
  std::string grpc_address_;

  prometheus::Gauge& waiting_;
  prometheus::Gauge& kv_usage_;
  prometheus::Gauge& pages_used_;
  prometheus::Gauge& frozen_sources_;
  prometheus::Gauge& frozen_tokens_;
  prometheus::Counter& frozen_dropped_;
  prometheus::Gauge& canonical_queued_;
  prometheus::Counter& canonical_computed_;
  prometheus::Counter& canonical_cancelled_;
  prometheus::Counter& canonical_dropped_;
  prometheus::Counter& canonical_tokens_;
  prometheus::Gauge& sessions_;
  prometheus::Gauge& session_pages_;
  prometheus::Counter& sessions_evicted_;
  prometheus::Counter& sessions_expired_;
  prometheus::Counter& published_new_;
  prometheus::Counter& published_existing_;
  prometheus::Counter& published_bytes_;
};

}  // namespace spl::prefill
