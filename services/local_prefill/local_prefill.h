// The prefill that a decode worker does itself: short prompts, between the steps of its running sequences, so that they
// need not queue behind long ones of the prefill pool. The same engine and the same code as a prefill worker's
// (prefill_core); its KV reaches the tickets' pages by a copy inside the process.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "services/base/metrics.h"
#include "services/base/tls.h"
#include "services/base/trace.h"
#include "services/engine/engine.h"
#include "services/prefill/cache_streams.h"
#include "services/prefill/kv_push.h"
#include "services/prefill/peer_table.h"
#include "services/prefill/prefill_core.h"
#include "services/prefill/ticket_guard.h"
#include "services/transport/kv_transport.h"
#include "spl/v1/decode.pb.h"
#include "spl/v1/prefill.grpc.pb.h"

namespace spl::local_prefill {

struct LocalPrefillOptions {
  // Tokens of a prompt without KV that are computed here at most; 0: no prompt is.
  uint32_t max_new_tokens = 0;
  // Of a page pool of its own: prompts while they are computed, and then their prefixes for later ones.
  uint64_t kv_bytes = 256ull << 20;
  int32_t slice_tokens = 128;  // between two decode steps: how long running sequences wait for one slice
  int32_t num_threads = 0;     // 0: one per core
  std::string store_address;   // as of a prefill worker; empty: none
};

// The decode worker that it is part of. All but the strings outlive it.
struct DecodeHost {
  std::shared_ptr<const engine::Model> model;
  transport::KvTransport& transport;  // for the store, and to register the pages
  std::shared_ptr<engine::StepTurns> turns;
  Metrics& metrics;
  const Tracer& tracer;
  std::shared_ptr<const PeerTls> tls;  // of calls to the store
  std::string worker_id;
  uint64_t epoch = 0;
};

// Owns engine, pages and threads. Stop() before destruction. Order at the end: Drain while the worker's server still
// answers (what is under way releases its tickets there), then the server, then Stop.
class LocalPrefill {
 public:
  // InvalidArgument: a pool that holds fewer tokens than max_new_tokens.
  static absl::StatusOr<std::unique_ptr<LocalPrefill>> Create(const LocalPrefillOptions& options,
                                                              const DecodeHost& host);
  ~LocalPrefill();

  // To be registered with the worker's server: Prefill.Run, RevokeTicket and WatchCache.
  grpc::Service& service();

  // Before the first Run: the way to the worker's pages, `memory` being what `endpoint` describes, and to its service.
  absl::Status Connect(const v1::DecodeEndpoint& endpoint, std::span<std::byte> memory,
                       std::shared_ptr<grpc::Channel> decode);

  void Describe(v1::LocalPrefill& info) const;  // any thread
  void UpdateGauges();
  // Refuses new prompts, lets what is under way end until the deadline, then ends it. Returns when every Run is
  // answered.
  void Drain(std::chrono::steady_clock::time_point deadline);
  void Stop();  // idempotent

  const engine::PagePool& pool() const { return engine_->pool(); }

 private:
  class Service;
  LocalPrefill(const LocalPrefillOptions& options, const DecodeHost& host);

  const LocalPrefillOptions options_;
  const DecodeHost host_;
  const std::string worker_id_;
  std::unique_ptr<transport::RegisteredMemory> memory_;  // the pages, of a model on the host
  std::optional<engine::KvMemory> device_memory_;        // of a model on GPUs
  prefill::CacheEvents cache_events_;
  std::unique_ptr<prefill::CacheStreams> cache_streams_;
  prefill::TicketGuard tickets_{{}, Clock::Real()};  // held by what engine and push thread have
  std::unique_ptr<engine::PrefillEngine> engine_;
  std::span<std::byte> own_memory_;                // of Connect
  std::shared_ptr<grpc::Channel> decode_channel_;  // likewise
  std::unique_ptr<prefill::PeerTable> peers_;
  std::unique_ptr<prefill::PushWorker> pushes_;
  std::unique_ptr<prefill::PrefillCore> core_;
  std::unique_ptr<Service> service_;
  std::shared_ptr<const prefill::Peer> own_;  // once connected
  std::atomic<bool> draining_{false};

  prometheus::Gauge& waiting_;
  prometheus::Gauge& pages_used_;
};

}  // namespace spl::local_prefill
