#include "services/router/fleet/fleet.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <set>
#include <utility>

#include "services/base/log.h"
#include "services/base/status.h"
#include "services/router/fleet/workers.h"

namespace spl::router {

bool FleetSnapshot::HasUsablePair() const {
  for (const PrefillView& p : prefill) {
    if (p.draining) continue;
    for (const DecodeView& d : decode) {
      const auto link = p.peers.find(d.worker_id);
      if (!d.draining && link != p.peers.end() && link->second.decode_epoch == d.epoch) return true;
    }
  }
  return false;
}

namespace {

using Clock = std::chrono::steady_clock;

// One configured address. Only the fleet's strand touches it.
template <typename Worker, typename Info>
struct Slot {
  std::string address;
  std::shared_ptr<Worker> worker;
  std::unique_ptr<boost::asio::steady_timer> timer;
  bool alive = false;
  bool suspect = false;  // alive by the last poll, but a call has failed since
  int failures = 0;
  Info info;
  bool mismatch_logged = false;
};

// A wanted connection between one life of a prefill worker and one life of a decode worker.
struct Connection {
  uint64_t prefill_epoch = 0;
  uint64_t decode_epoch = 0;
  bool ready = false;
  bool connecting = false;
  Clock::time_point ready_since;
  Clock::time_point retry_at;
  PeerLink link;
};

using PrefillSlot = Slot<PrefillWorker, v1::PrefillInfo>;
using DecodeSlot = Slot<DecodeWorker, v1::DecodeInfo>;

class PollingFleet final : public Fleet {
 public:
  PollingFleet(boost::asio::io_context& io, FleetOptions options, std::shared_ptr<CallTracker> calls, Metrics& metrics)
      : options_(std::move(options)),
        calls_(std::move(calls)),
        strand_(boost::asio::make_strand(io)),
        alive_prefill_(metrics.Gauge("splice_router_workers", "Workers that answer.", {{"worker_type", "prefill"}})),
        alive_decode_(metrics.Gauge("splice_router_workers", "Workers that answer.", {{"worker_type", "decode"}})) {
    for (const std::string& address : options_.prefill) AddSlot(address, &prefill_);
    for (const std::string& address : options_.decode) AddSlot(address, &decode_);
  }

  void Start(Listener listener) override {
    boost::asio::post(strand_, [self = Self(), listener = std::move(listener)]() mutable {
      self->listener_ = std::move(listener);
      for (auto& slot : self->prefill_) self->Poll(*slot);
      for (auto& slot : self->decode_) self->Poll(*slot);
    });
  }

  void Stop() override {
    boost::asio::post(strand_, [self = Self()] {
      self->stopped_ = true;
      self->listener_ = {};
      for (auto& slot : self->prefill_) slot->timer->cancel();
      for (auto& slot : self->decode_) slot->timer->cancel();
    });
  }

  // Requests that run there are left alone: each of them sees its own call fail if the worker is really gone.
  void ReportFailure(const std::string& worker_id) override {
    boost::asio::post(strand_, [self = Self(), worker_id] {
      for (auto& slot : self->prefill_) self->Suspect(*slot, worker_id);
      for (auto& slot : self->decode_) self->Suspect(*slot, worker_id);
    });
  }

 private:
  std::shared_ptr<PollingFleet> Self() { return std::static_pointer_cast<PollingFleet>(shared_from_this()); }

  template <typename S>
  void AddSlot(const std::string& address, std::vector<std::unique_ptr<S>>* slots) {
    auto slot = std::make_unique<S>();
    slot->address = address;
    slot->worker = std::make_shared<typename decltype(slot->worker)::element_type>(address, calls_);
    slot->timer = std::make_unique<boost::asio::steady_timer>(strand_);
    slots->push_back(std::move(slot));
  }

  void Poll(PrefillSlot& slot) {
    StartPoll<v1::GetPrefillInfoRequest>(slot, &v1::Prefill::Stub::async_interface::GetInfo);
  }
  void Poll(DecodeSlot& slot) {
    StartPoll<v1::GetDecodeInfoRequest>(slot, &v1::Decode::Stub::async_interface::GetInfo);
  }

  template <typename Request, typename W, typename Info>
  void StartPoll(Slot<W, Info>& slot, typename UnaryCall<Request, Info>::template Method<typename W::Async> method) {
    if (stopped_) return;
    using Call = UnaryCall<Request, Info>;
    const Clock::time_point asked_at = Clock::now();
    auto done = [self = Self(), &slot, asked_at](absl::Status status, Call& call) {
      auto info = std::make_shared<Info>();
      info->Swap(&call.response);
      boost::asio::post(self->strand_, [self, &slot, asked_at, status = std::move(status), info] {
        self->OnPolled(slot, asked_at, status, *info);
      });
    };
    Call::Start(std::make_shared<Call>(), *slot.worker, method, asked_at + options_.poll_timeout, std::move(done));
  }

  template <typename S, typename Info>
  void OnPolled(S& slot, Clock::time_point asked_at, const absl::Status& status, Info& info) {
    if (stopped_) return;
    if (!status.ok()) {
      ++slot.failures;
      const bool refused = status.code() == absl::StatusCode::kUnavailable;
      if (slot.alive && (refused || slot.failures >= options_.failures_until_lost)) {
        Lose(slot, MessageOf(status).c_str());
      }
    } else {
      slot.failures = 0;
      Accept(slot, asked_at, info);
    }
    Rebuild();
    if (listener_.on_refresh) listener_.on_refresh();
    slot.timer->expires_after(options_.poll_interval);
    slot.timer->async_wait([self = Self(), &slot](const boost::system::error_code& error) {
      if (!error) self->Poll(slot);
    });
  }

  template <typename S, typename Info>
  void Accept(S& slot, Clock::time_point asked_at, Info& info) {
    if (slot.alive && slot.info.epoch() != info.epoch()) Lose(slot, "it was restarted");
    if (!slot.alive) {
      log::Info("router.worker_found", log::F("worker", info.worker_id()), log::F("address", slot.address),
                log::F("epoch", info.epoch()));
      slot.mismatch_logged = false;
    }
    slot.alive = true;
    slot.suspect = false;
    slot.info.Swap(&info);
    if constexpr (std::is_same_v<S, PrefillSlot>) ForgetDroppedPeers(slot, asked_at);
  }

  template <typename S>
  void Lose(S& slot, const char* reason) {
    slot.alive = false;
    log::Warning("router.worker_lost", log::F("worker", slot.info.worker_id()), log::F("address", slot.address),
                 log::F("reason", std::string_view(reason)));
    Rebuild();
    if (listener_.on_lost) listener_.on_lost(slot.info.worker_id());
  }

  template <typename S>
  void Suspect(S& slot, const std::string& worker_id) {
    if (!slot.alive || slot.info.worker_id() != worker_id) return;
    slot.suspect = true;
    Rebuild();
  }

  // A prefill worker that no longer lists a peer has closed that connection (it had an error): open it again.
  void ForgetDroppedPeers(PrefillSlot& slot, Clock::time_point asked_at) {
    const auto& peers = slot.info.connected_peers();
    for (auto& [key, connection] : connections_) {
      if (key.first != slot.info.worker_id() || !connection.ready || connection.ready_since >= asked_at) continue;
      if (std::find(peers.begin(), peers.end(), key.second) == peers.end()) connection.ready = false;
    }
  }

  // The first worker that answers says which model the fleet serves; it stays so while any worker of it is alive.
  void ChooseModel() {
    const v1::ModelIdentity* first = nullptr;
    bool still_served = false;
    const auto consider = [&](bool alive, const v1::ModelIdentity& model) {
      if (!alive) return;
      if (first == nullptr) first = &model;
      still_served |= model.fingerprint() == reference_.fingerprint();
    };
    for (const auto& slot : prefill_) consider(slot->alive, slot->info.model());
    for (const auto& slot : decode_) consider(slot->alive, slot->info.model());
    if (!still_served && first != nullptr) reference_ = *first;
  }

  template <typename S>
  bool Agrees(S& slot) {
    const v1::ModelIdentity& model = slot.info.model();
    const bool same_model = model.fingerprint() == reference_.fingerprint();
    const bool same_layout = model.layout_digest() == reference_.layout_digest();
    const bool agrees = same_model && same_layout && model.head_class_digest() == reference_.head_class_digest();
    if (!agrees && !slot.mismatch_logged) {
      slot.mismatch_logged = true;
      const absl::Status status =
          Errorf(absl::StatusCode::kFailedPrecondition,
                 "worker {} serves another model, page layout or map of head classes than the fleet ({})",
                 slot.info.worker_id(),
                 !same_model    ? "fingerprint"
                 : !same_layout ? "layout digest"
                                : "head class digest");
      log::Error("router.worker_excluded", log::F("address", slot.address), log::F("status", status));
    }
    return agrees;
  }

  // Connections of workers that are gone are forgotten: worker ids may be new after every restart.
  void PruneConnections() {
    std::set<std::string> alive;
    for (const auto& slot : prefill_) {
      if (slot->alive) alive.insert(slot->info.worker_id());
    }
    for (const auto& slot : decode_) {
      if (slot->alive) alive.insert(slot->info.worker_id());
    }
    std::erase_if(connections_, [&](const auto& entry) {
      const auto& [key, connection] = entry;
      return !connection.connecting && (!alive.contains(key.first) || !alive.contains(key.second));
    });
  }

  void Rebuild() {
    ChooseModel();
    PruneConnections();
    auto snapshot = std::make_shared<FleetSnapshot>();
    FillModel(&snapshot->model);
    for (auto& slot : decode_) {
      if (slot->alive && !slot->suspect && Agrees(*slot)) snapshot->decode.push_back(ViewOf(*slot));
    }
    for (auto& slot : prefill_) {
      if (!slot->alive || slot->suspect || !Agrees(*slot)) continue;
      for (auto& peer : decode_) {
        if (peer->alive && Agrees(*peer)) EnsureConnected(*slot, *peer);
      }
      snapshot->prefill.push_back(ViewOf(*slot));
    }
    alive_prefill_.Set(static_cast<double>(snapshot->prefill.size()));
    alive_decode_.Set(static_cast<double>(snapshot->decode.size()));
    Publish(std::move(snapshot));
  }

  void FillModel(FleetModel* model) const {
    if (reference_.fingerprint().size() != model->fingerprint.size()) return;
    model->known = true;
    model->name = reference_.name();
    std::copy(reference_.fingerprint().begin(), reference_.fingerprint().end(), model->fingerprint.begin());
    model->layout_digest = reference_.layout_digest();
    model->max_context = reference_.max_context();
    model->vocab_size = reference_.vocab_size();
    model->default_reuse = reference_.default_reuse();
  }

  PrefillView ViewOf(const PrefillSlot& slot) const {
    const v1::PrefillInfo& info = slot.info;
    PrefillView view{.worker = slot.worker,
                     .worker_id = info.worker_id(),
                     .address = slot.address,
                     .epoch = info.epoch(),
                     .queued_tokens = info.queued_tokens(),
                     .tokens_per_s = info.prefill_tokens_per_s(),
                     .max_prompt_tokens = info.max_prompt_tokens(),
                     .draining = info.draining()};
    for (const auto& [key, connection] : connections_) {
      const bool ours = key.first == info.worker_id() && connection.prefill_epoch == info.epoch();
      if (ours && connection.ready) view.peers[key.second] = connection.link;
    }
    return view;
  }

  static DecodeView ViewOf(const DecodeSlot& slot) {
    const v1::DecodeInfo& info = slot.info;
    return DecodeView{.worker = slot.worker,
                      .worker_id = info.worker_id(),
                      .address = slot.address,
                      .epoch = info.epoch(),
                      .sequences = info.running_sequences() + info.reserved_tickets(),
                      .max_sequences = info.max_sequences(),
                      .free_pages = info.free_pages(),
                      .total_pages = info.total_pages(),
                      .step_seconds = info.step_seconds(),
                      .max_sequence_tokens = info.max_sequence_tokens(),
                      .kv_bytes_per_token = info.kv_bytes_per_token(),
                      .draining = info.draining()};
  }

  void EnsureConnected(PrefillSlot& p, DecodeSlot& d) {
    Connection& connection = connections_[{p.info.worker_id(), d.info.worker_id()}];
    const bool same_lives = connection.prefill_epoch == p.info.epoch() && connection.decode_epoch == d.info.epoch();
    if (!same_lives && !connection.connecting) {
      connection = Connection{.prefill_epoch = p.info.epoch(), .decode_epoch = d.info.epoch()};
    }
    if (connection.ready || connection.connecting || Clock::now() < connection.retry_at) return;
    connection.connecting = true;
    using Call = UnaryCall<v1::ConnectPeerRequest, v1::ConnectPeerResponse>;
    auto call = std::make_shared<Call>();
    *call->request.mutable_endpoint() = d.info.endpoint();
    const auto key = std::make_pair(p.info.worker_id(), d.info.worker_id());
    auto done = [self = Self(), key](absl::Status status, Call& finished) {
      PeerLink link{.transport = finished.response.transport(), .bytes_per_s = finished.response.bytes_per_s()};
      boost::asio::post(self->strand_, [self, key, status = std::move(status), link = std::move(link)] {
        self->OnConnected(key, status, link);
      });
    };
    Call::Start(call, *p.worker, &v1::Prefill::Stub::async_interface::ConnectPeer,
                Clock::now() + options_.connect_timeout, std::move(done));
  }

  void OnConnected(const std::pair<std::string, std::string>& key, const absl::Status& status, const PeerLink& link) {
    Connection& connection = connections_[key];
    connection.connecting = false;
    if (status.ok()) {
      connection.ready = true;
      connection.ready_since = Clock::now();
      connection.link = link;
      connection.link.decode_epoch = connection.decode_epoch;
      log::Info("router.peers_connected", log::F("prefill", key.first), log::F("decode", key.second),
                log::F("transport", link.transport), log::F("bytes_per_s", link.bytes_per_s));
    } else {
      connection.retry_at = Clock::now() + options_.connect_retry;
      log::Warning("router.peers_not_connected", log::F("prefill", key.first), log::F("decode", key.second),
                   log::F("status", status));
    }
    if (stopped_) return;
    Rebuild();
    if (listener_.on_refresh) listener_.on_refresh();
  }

  const FleetOptions options_;
  const std::shared_ptr<CallTracker> calls_;
  boost::asio::strand<boost::asio::io_context::executor_type> strand_;
  prometheus::Gauge& alive_prefill_;
  prometheus::Gauge& alive_decode_;
  // All below: strand_ only. Slots are never removed, so references to them stay good.
  std::vector<std::unique_ptr<PrefillSlot>> prefill_;
  std::vector<std::unique_ptr<DecodeSlot>> decode_;
  std::map<std::pair<std::string, std::string>, Connection> connections_;  // by (prefill, decode) worker_id
  v1::ModelIdentity reference_;
  Listener listener_;
  bool stopped_ = false;
};

}  // namespace

std::shared_ptr<Fleet> Fleet::Create(boost::asio::io_context& io, FleetOptions options,
                                     std::shared_ptr<CallTracker> calls, Metrics& metrics) {
  return std::make_shared<PollingFleet>(io, std::move(options), std::move(calls), metrics);
}

}  // namespace spl::router
