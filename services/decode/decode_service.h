// The Decode gRPC service: reservations, landing, token streams. Translates and delegates; the engine decodes.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "services/base/bounded_queue.h"
#include "services/base/metrics.h"
#include "services/base/tls.h"
#include "services/base/trace.h"
#include "services/decode/local_prefill.h"
#include "services/decode/reservation.h"
#include "services/decode/ticket_table.h"
#include "services/decode/token_chunks.h"
#include "services/decode/writer_fence.h"
#include "services/engine/engine.h"
#include "services/grammar/grammar_cache.h"
#include "spl/v1/decode.grpc.pb.h"

namespace spl::decode {

struct DecodeServiceOptions {
  size_t max_tickets = 256;   // in all states together
  int32_t max_sequences = 0;  // that run in one decode step; routers are told
  std::chrono::milliseconds default_ttl{60'000};
  // Longer than any prompt takes, also one whose deadline was raised (splice-router --request-timeout-ms).
  std::chrono::milliseconds max_ttl{std::chrono::hours(4)};
  std::shared_ptr<const PeerTls> tls;               // for calls to prefill workers; null: no TLS
  std::shared_ptr<grammar::GrammarCache> grammars;  // null: requests for structured output are refused
  transport::KvTransport* transport = nullptr;  // the transport on which the pool is registered; outlives the service
};

// Borrows engine, pool and metrics. gRPC threads only validate and enqueue. One landing thread verifies checksums.
class DecodeService final : public v1::Decode::CallbackService {
 public:
  // pools.landing is null unless the pool is on a GPU.
  DecodeService(engine::DecodeEngine& engine, const ReservationPools& pools, const v1::DecodeEndpoint& endpoint,
                const DecodeServiceOptions& options, Metrics& metrics, const Tracer& tracer);
  ~DecodeService() override;

  grpc::ServerUnaryReactor* SetDraining(grpc::CallbackServerContext* context, const v1::SetDrainingRequest* request,
                                        v1::SetDrainingResponse* response) override;
  grpc::ServerUnaryReactor* GetInfo(grpc::CallbackServerContext* context, const v1::GetDecodeInfoRequest* request,
                                    v1::DecodeInfo* response) override;
  grpc::ServerUnaryReactor* Reserve(grpc::CallbackServerContext* context, const v1::ReserveRequest* request,
                                    v1::Ticket* response) override;
  grpc::ServerUnaryReactor* Commit(grpc::CallbackServerContext* context, const v1::CommitRequest* request,
                                   v1::CommitResponse* response) override;
  grpc::ServerWriteReactor<v1::StreamChunk>* Stream(grpc::CallbackServerContext* context,
                                                    const v1::StreamRequest* request) override;
  grpc::ServerUnaryReactor* Release(grpc::CallbackServerContext* context, const v1::ReleaseRequest* request,
                                    v1::ReleaseResponse* response) override;

  // Commit by a prefill worker of this process, past the server: the next step may be waiting for the sequence. `done`
  // is called before it returns, or by the landing thread. Until Stop.
  void CommitHere(const v1::CommitRequest& request, const TraceContext& trace, std::function<void(absl::Status)> done);

  // Sets the local prefill of this worker, once it is ready; null (the default): none. Part of every GetInfo answer.
  void set_local_prefill(const local_prefill::LocalPrefill* local_prefill) { local_prefill_ = local_prefill; }
  // The worker's gRPC address, known once its server listens; part of every GetInfo answer.
  void set_grpc_address(const std::string& address);
  // Refuses new tickets; returns when all running ones have ended, or at the deadline.
  void Drain(std::chrono::steady_clock::time_point deadline);
  void UpdateGauges();
  // Ends every ticket. Call it before the engine stops.
  void Stop();

 private:
  using Grammar = std::shared_ptr<const grammar::TokenGrammar>;  // null: any text
  struct LandingTask {
    Ticket* ticket = nullptr;  // in state kLanding: no other thread touches its kv
    v1::CommitRequest request;
    std::function<void(absl::Status)> done;
    Span span;  // span of the commit
  };

  absl::Status DoReserve(const v1::ReserveRequest& request, Grammar grammar, v1::Ticket& response);
  absl::Status DoCommit(const v1::CommitRequest& request, std::function<void(absl::Status)> done, Span span);
  void CountRefusal(const absl::Status& status);
  void LandingLoop();
  void Land(LandingTask task);
  absl::Status Launch(Ticket& ticket, const v1::CommitRequest& request, const TraceContext& trace);

  const Tracer& tracer_;
  engine::DecodeEngine& engine_;
  engine::PagePool& pool_;
  const ReservationPools pools_;
  const DecodeServiceOptions options_;
  std::atomic<const local_prefill::LocalPrefill*> local_prefill_{nullptr};
  mutable std::mutex endpoint_mutex_;  // guards endpoint_
  v1::DecodeEndpoint endpoint_;
  WriterFence fence_;
  TicketTable tickets_;
  BoundedQueue<LandingTask> landing_;
  std::thread landing_thread_;
  bool draining() const { return draining_ || draining_by_operator_; }

  std::atomic<bool> draining_{false};              // for good: the process ends
  std::atomic<bool> draining_by_operator_{false};  // until further notice

  prometheus::Gauge& running_;
  prometheus::Gauge& waiting_;
  prometheus::Gauge& kv_usage_;
  prometheus::Gauge& leases_;
  prometheus::Gauge& pages_used_;
  prometheus::Gauge& pages_cached_;
  prometheus::Gauge& pages_quarantined_;
  prometheus::Gauge& tickets_stuck_;
  prometheus::Counter& writers_cut_;
  prometheus::Counter& generated_tokens_;
  prometheus::Counter& bytes_in_;
  prometheus::Counter& checksum_failures_;
  prometheus::Counter& expired_;
  prometheus::Counter& preemptions_;
  prometheus::Gauge& parked_;
  prometheus::Gauge& parked_bytes_;
  prometheus::Gauge& host_kv_bytes_;
  prometheus::Counter& host_rows_found_;
  prometheus::Counter& host_rows_copied_;
  prometheus::Counter& refused_unknown_;
  prometheus::Counter& refused_generation_;
  prometheus::Counter& refused_replayed_;
  const TokenChunks chunks_;
  prometheus::Counter& decoded_densely_;
};

}  // namespace spl::decode
