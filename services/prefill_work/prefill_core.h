// Handles one prompt from a router: checks ticket and request, computes, delivers the KV to the decode worker, and
// answers with the first tokens and the receipt. Used by splice-prefill, and by decode workers that
// prefill short prompts themselves (services/decode/local_prefill.h).
#pragma once

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <string>

#include "services/base/metrics.h"
#include "services/base/trace.h"
#include "services/engine/engine.h"
#include "services/grammar/grammar_cache.h"
#include "services/prefill_work/engine_call.h"
#include "services/prefill_work/fidelity_sampler.h"
#include "services/prefill_work/peer_table.h"
#include "services/prefill_work/prompt_delivery.h"
#include "services/prefill_work/ticket_guard.h"
#include "spl/v1/prefill.pb.h"

namespace spl::prefill {

struct PrefillCoreOptions {
  std::string worker_id;  // for receipts, spans and errors
  uint64_t epoch = 0;
  FidelityShares fidelity;          // shares of the prompts that are compared with exact
  int64_t max_computed_tokens = 0;  // limit per prompt (engine::PrefillRequest); 0: none
  // The pool of a decode worker in this process, when the engine computes in it; null: it has a pool of its own.
  std::shared_ptr<engine::SharedPool> shared;
  std::shared_ptr<grammar::GrammarCache> grammars;  // null: requests for structured output are refused
};

// Borrows everything. gRPC threads only validate and enqueue.
class PrefillCore {
 public:
  PrefillCore(engine::PrefillEngine& engine, PeerTable& peers, PushWorker& pushes, TicketGuard& tickets,
              PrefillCoreOptions options, Metrics& metrics, const Tracer& tracer);

  // Handles Prefill.Run. Unavailable: the worker is draining.
  grpc::ServerUnaryReactor* Run(grpc::CallbackServerContext* context, const v1::PrefillRequest* request,
                                v1::PrefillResponse* response, bool draining);
  // Handles Prefill.RevokeTicket.
  grpc::ServerUnaryReactor* RevokeTicket(grpc::CallbackServerContext* context, const v1::RevokeTicketRequest* request);
  void UpdateGauges();
  // Whether structured output is served (PrefillInfo.structured_output).
  bool keeps_to_grammars() const { return options_.grammars != nullptr; }

 private:
  using RunCall = EngineCall<v1::PrefillRequest, v1::PrefillResponse>;
  absl::Status Start(RunCall& call, std::shared_ptr<const grammar::TokenGrammar> grammar);
  absl::Status CheckTicket(const v1::PrefillRequest& request, const Peer& peer, const engine::PrefillRequest& prefill,
                           const engine::StreamClasses* classes) const;
  absl::StatusOr<std::shared_ptr<PromptDelivery>> MakeDelivery(const v1::PrefillRequest& request,
                                                               std::shared_ptr<const Peer> peer,
                                                               std::shared_ptr<const engine::StreamClasses> classes,
                                                               std::unique_ptr<TicketGuard::Hold> hold);
  void Count(const engine::PrefillStats& stats);
  void CountChoice(const engine::MethodChoice& choice);
  void TraceStages(const TraceContext& run, const TraceContext& fetch, const engine::PrefillStats& stats) const;

  engine::PrefillEngine& engine_;
  PeerTable& peers_;
  PushWorker& pushes_;
  TicketGuard& tickets_;
  const PrefillCoreOptions options_;
  const Tracer& tracer_;
  Metrics& metrics_;
  FidelitySampler fidelity_;

  prometheus::Gauge& tickets_revoked_;
  prometheus::Gauge& agreement_records_;
  prometheus::Counter& agreement_forgotten_;
  prometheus::Counter& late_runs_;
  prometheus::Counter& tickets_invalid_;
  prometheus::Counter& tickets_replayed_;
  prometheus::Counter& prompt_tokens_;
  prometheus::Counter& reused_prefix_;
  prometheus::Counter& reused_session_;
  prometheus::Counter& reused_segment_;
  prometheus::Counter& copied_same_;
  prometheus::Counter& copied_isolated_;
  prometheus::Counter& copied_foreign_;
  prometheus::Counter& recomputed_;
  prometheus::Counter& reused_miss_;
  prometheus::Counter& fetched_bytes_;
  prometheus::Counter &skipped_slower_, &skipped_late_, &skipped_shared_;
  prometheus::Gauge &store_rate_, &store_latency_;
  prometheus::Counter &line_prompts_, &line_heads_, &line_dense_heads_;
  prometheus::Histogram &line_covered_, &line_cells_, &line_held_out_;
  prometheus::Histogram& stage_queue_;
  prometheus::Histogram& stage_lookup_;
  prometheus::Histogram& stage_fetch_;
  prometheus::Histogram& stage_prefill_;
};

}  // namespace spl::prefill
