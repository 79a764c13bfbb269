#include "services/router/fleet/fleet.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <deque>
#include <set>
#include <utility>

#include "services/base/clock.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "services/membership/static_list.h"
#include "services/router/fleet/cache_view.h"
#include "services/router/fleet/cache_watch.h"
#include "services/router/fleet/worker_slot.h"
#include "services/router/fleet/worker_views.h"
#include "services/router/fleet/workers.h"
#include "services/wire/version.h"

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

bool FleetSnapshot::Serves() const {
  return HasUsablePair() ||
         (had_pair && std::any_of(local.begin(), local.end(), [](const PrefillView& p) { return !p.draining; }));
}

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kLostLives = 1024;  // remembered

// A member that has not answered this many polls (two seconds by default) is logged; before that it may be starting.
constexpr int kPollsBeforeWarning = 10;

bool HasWork(const v1::PrefillInfo& info) { return info.queued_requests() > 0; }
bool HasWork(const v1::DecodeInfo& info) { return info.running_sequences() + info.reserved_tickets() > 0; }

class PollingFleet final : public Fleet {
 public:
  PollingFleet(boost::asio::io_context& io, FleetOptions options, std::shared_ptr<CallTracker> calls, Metrics& metrics)
      : options_(std::move(options)),
        calls_(std::move(calls)),
        strand_(boost::asio::make_strand(io)),
        alive_prefill_(metrics.Gauge("splice_router_workers", "Workers that answer.", {{"worker_type", "prefill"}})),
        alive_decode_(metrics.Gauge("splice_router_workers", "Workers that answer.", {{"worker_type", "decode"}})),
        local_prefill_(metrics.Gauge("splice_router_local_prefill_workers",
                                     "Decode workers that answer and prefill short prompts themselves.")),
        members_prefill_(
            metrics.Gauge("splice_router_members", "Workers in the member list.", {{"worker_type", "prefill"}})),
        members_decode_(
            metrics.Gauge("splice_router_members", "Workers in the member list.", {{"worker_type", "decode"}})),
        lost_refused_(LostCounter(metrics, "refused")),
        lost_silent_(LostCounter(metrics, "silent")),
        lost_restarted_(LostCounter(metrics, "restarted")),
        silence_(metrics.Histogram("splice_router_worker_silence_seconds",
                                   "From a lost worker's last sign of life to its loss.",
                                   {0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 5, 10})) {
    discovery_ = options_.discovery != nullptr ? options_.discovery
                                               : membership::MakeStaticList(options_.prefill, options_.decode);
  }

  void Start(Listener listener) override {
    boost::asio::post(
        strand_, [self = Self(), listener = std::move(listener)]() mutable { self->listener_ = std::move(listener); });
    discovery_->Start([weak = std::weak_ptr<PollingFleet>(Self())](const membership::Members& members) {
      const auto self = weak.lock();
      if (self == nullptr) return;
      boost::asio::post(self->strand_, [self, members] { self->SetMembers(members); });
    });
  }

  void Stop() override {
    discovery_->Stop();
    boost::asio::post(strand_, [self = Self()] {
      self->stopped_ = true;
      self->listener_ = {};
      for (auto& slot : self->prefill_) slot->timer->cancel();
      for (auto& slot : self->decode_) slot->timer->cancel();
    });
  }

  Fate FateOf(const std::string& worker_id, uint64_t epoch, Clock::time_point since) const override {
    std::lock_guard lock(lives_mutex_);
    if (std::find(lost_.begin(), lost_.end(), std::make_pair(worker_id, epoch)) != lost_.end()) return Fate::kLost;
    const auto alive = answered_.find({worker_id, epoch});
    return alive != answered_.end() && alive->second > since ? Fate::kAlive : Fate::kUnknown;
  }

  void Look(const std::string& worker_id) override {
    boost::asio::post(strand_, [self = Self(), worker_id] {
      for (auto& slot : self->prefill_) self->PollNow(slot, worker_id);
      for (auto& slot : self->decode_) self->PollNow(slot, worker_id);
    });
  }

  // Requests that run there are left alone: each of them sees its own call fail if the worker is really gone.
  void ReportFailure(const std::string& worker_id) override {
    boost::asio::post(strand_, [self = Self(), worker_id] {
      for (auto& slot : self->prefill_) self->Suspect(slot, worker_id);
      for (auto& slot : self->decode_) self->Suspect(slot, worker_id);
    });
  }

 private:
  std::shared_ptr<PollingFleet> Self() { return std::static_pointer_cast<PollingFleet>(shared_from_this()); }

  static prometheus::Counter& LostCounter(Metrics& metrics, const char* reason) {
    return metrics.Counter("splice_router_workers_lost_total", "Workers that stopped answering, or were restarted.",
                           {{"reason", reason}});
  }

  void SetMembers(const membership::Members& members) {
    if (stopped_) return;
    std::vector<std::string> prefill, decode;
    for (const membership::Member& member : members)
      (member.role == membership::Role::kPrefill ? prefill : decode).push_back(member.address);
    log::Info("router.members", log::F("discovery", discovery_->description()), log::F("prefill", prefill.size()),
              log::F("decode", decode.size()));
    members_prefill_.Set(static_cast<double>(prefill.size()));
    members_decode_.Set(static_cast<double>(decode.size()));
    UpdateSlots(prefill, &prefill_);
    UpdateSlots(decode, &decode_);
    Rebuild();
    if (listener_.on_refresh) listener_.on_refresh();
  }

  template <typename S>
  void UpdateSlots(const std::vector<std::string>& addresses, std::vector<std::shared_ptr<S>>* slots) {
    for (const auto& slot : *slots)
      slot->listed = std::find(addresses.begin(), addresses.end(), slot->address) != addresses.end();
    for (const std::string& address : addresses) {
      const auto same = [&](const auto& slot) { return slot->address == address; };
      if (std::any_of(slots->begin(), slots->end(), same)) continue;
      auto slot = std::make_shared<S>();
      slot->address = address;
      slot->worker =
          std::make_shared<typename decltype(slot->worker)::element_type>(address, options_.tls.get(), calls_);
      slot->timer = std::make_unique<boost::asio::steady_timer>(strand_);
      slots->push_back(slot);
      Poll(slot);
    }
  }

  void Poll(const std::shared_ptr<PrefillSlot>& slot) {
    StartPoll<v1::GetPrefillInfoRequest>(slot, &v1::Prefill::Stub::async_interface::GetInfo);
  }
  void Poll(const std::shared_ptr<DecodeSlot>& slot) {
    StartPoll<v1::GetDecodeInfoRequest>(slot, &v1::Decode::Stub::async_interface::GetInfo);
  }

  template <typename Request, typename W, typename Info>
  void StartPoll(const std::shared_ptr<Slot<W, Info>>& slot,
                 typename UnaryCall<Request, Info>::template Method<typename W::Async> method) {
    if (stopped_) return;
    using Call = UnaryCall<Request, Info>;
    slot->polling = true;
    const Clock::time_point asked_at = Clock::now();
    auto done = [self = Self(), slot, asked_at](absl::Status status, Call& call) {
      auto info = std::make_shared<Info>();
      info->Swap(&call.response);
      const Clock::time_point answered_at = Clock::now();
      const int64_t ours = UnixNanos();
      std::string version = ProgramVersionIn(call.context);
      boost::asio::post(self->strand_, [self, slot, asked_at, answered_at, ours, status = std::move(status), info,
                                        version = std::move(version)]() mutable {
        if (status.ok() && info->unix_nanos() != 0)
          slot->clock.Observe(info->unix_nanos(), ours, asked_at, answered_at);
        if (status.ok()) slot->version = std::move(version);
        self->OnPolled(slot, asked_at, status, *info);
      });
    };
    const auto timeout = slot->silent ? options_.confirm_timeout : options_.poll_timeout;
    Call::Start(std::make_shared<Call>(), *slot->worker, method, asked_at + timeout, std::move(done));
  }

  template <typename S, typename Info>
  void OnPolled(const std::shared_ptr<S>& slot, Clock::time_point asked_at, const absl::Status& status, Info& info) {
    slot->polling = false;
    if (stopped_) return;
    const bool refused = status.code() == absl::StatusCode::kUnavailable;
    const bool was_silent = std::exchange(slot->silent, !status.ok() && !refused);
    if (status.ok()) {
      Accept(*slot, asked_at, info);
    } else if (slot->alive && (refused || was_silent)) {
      Lose(*slot, refused ? lost_refused_ : lost_silent_, MessageOf(status).c_str());
    }
    slot->unanswered = slot->alive ? 0 : slot->unanswered + 1;
    if (slot->unanswered == kPollsBeforeWarning)
      log::Warning("router.worker_unreachable", log::F("address", slot->address), log::F("status", status));
    if constexpr (std::is_same_v<S, PrefillSlot>) {
      WatchCache(slot, slot->worker, slot->info.worker_id());
    } else if (slot->info.has_local_prefill()) {
      if (slot->local_prefill == nullptr)
        slot->local_prefill = std::make_shared<PrefillWorker>(slot->address, options_.tls.get(), calls_);
      WatchCache(slot, slot->local_prefill, slot->info.local_prefill().worker_id());
    }
    if (!slot->listed && (!slot->alive || !HasWork(slot->info))) return Remove(slot);
    Rebuild();
    if (listener_.on_refresh) listener_.on_refresh();
    if (slot->alive && slot->silent) return Poll(slot);  // once more, to be sure
    slot->timer->expires_after(options_.poll_interval);
    slot->timer->async_wait([self = Self(), slot](const boost::system::error_code& error) {
      if (!error && !slot->polling) self->Poll(slot);  // else PollNow was quicker
    });
  }

  // Watches the cache of `worker`, a prefill worker or the local prefill of a decode worker.
  template <typename S>
  void WatchCache(const std::shared_ptr<S>& slot, const std::shared_ptr<PrefillWorker>& worker,
                  const std::string& worker_id) {
    if (options_.caches == nullptr || !slot->alive || slot->watched) return;
    const uint64_t epoch = slot->info.epoch();
    if (slot->unwatchable_epoch == epoch) return;
    slot->watched = true;
    CacheWatch::Start(*worker, options_.caches, worker_id, epoch,
                      [self = Self(), slot, worker_id, epoch](const absl::Status& status) {
                        boost::asio::post(self->strand_, [self, slot, worker_id, epoch, status] {
                          // Whatever ended it: the next poll that is answered begins another.
                          slot->watched = false;
                          if (status.code() == absl::StatusCode::kUnimplemented) slot->unwatchable_epoch = epoch;
                          log::Debug("router.cache_watch_ended", log::F("worker", worker_id), log::F("status", status));
                        });
                      });
  }

  void ForgetCaches(const v1::PrefillInfo& info) {
    if (options_.caches != nullptr) options_.caches->Forget(info.worker_id());
  }
  void ForgetCaches(const v1::DecodeInfo& info) {
    if (options_.caches != nullptr && info.has_local_prefill())
      options_.caches->Forget(info.local_prefill().worker_id());
  }

  template <typename S>
  void Remove(const std::shared_ptr<S>& slot) {
    log::Info("router.worker_left", log::F("worker", slot->info.worker_id()), log::F("address", slot->address));
    if (slot->alive) ForgetLife(*slot);
    ForgetCaches(slot->info);
    slot->alive = false;
    Erase(slot);
    Rebuild();
    if (listener_.on_refresh) listener_.on_refresh();
  }
  void Erase(const std::shared_ptr<PrefillSlot>& slot) { std::erase(prefill_, slot); }
  void Erase(const std::shared_ptr<DecodeSlot>& slot) { std::erase(decode_, slot); }

  template <typename S, typename Info>
  void Accept(S& slot, Clock::time_point asked_at, Info& info) {
    if (slot.alive && slot.info.epoch() != info.epoch()) Lose(slot, lost_restarted_, "it was restarted");
    if (!slot.alive) {
      log::Info("router.worker_found", log::F("worker", info.worker_id()), log::F("address", slot.address),
                log::F("epoch", info.epoch()));
      slot.mismatch_logged = false;
    }
    slot.alive = true;
    slot.suspect = false;
    slot.answered = asked_at;
    slot.info.Swap(&info);
    {
      std::lock_guard lock(lives_mutex_);
      answered_[{slot.info.worker_id(), slot.info.epoch()}] = asked_at;
      // A poll was late and the worker is well after all.
      std::erase(lost_, std::make_pair(slot.info.worker_id(), slot.info.epoch()));
    }
    if constexpr (std::is_same_v<S, PrefillSlot>) ForgetDroppedPeers(slot, asked_at);
  }

  template <typename S>
  void ForgetLife(const S& slot) {
    std::lock_guard lock(lives_mutex_);
    answered_.erase({slot.info.worker_id(), slot.info.epoch()});
  }

  template <typename S>
  void Lose(S& slot, prometheus::Counter& counter, const char* reason) {
    slot.alive = false;
    counter.Increment();
    const double silence_s = std::chrono::duration<double>(Clock::now() - slot.answered).count();
    silence_.Observe(silence_s);
    ForgetLife(slot);
    ForgetCaches(slot.info);
    // A worker that was about to end was not killed by a request.
    if (!slot.info.draining()) {
      std::lock_guard lock(lives_mutex_);
      lost_.emplace_back(slot.info.worker_id(), slot.info.epoch());
      if (lost_.size() > kLostLives) lost_.pop_front();
    }
    log::Warning("router.worker_lost", log::F("worker", slot.info.worker_id()), log::F("address", slot.address),
                 log::F("silence_s", silence_s), log::F("reason", std::string_view(reason)));
    Rebuild();
    if (!listener_.on_lost) return;
    listener_.on_lost(slot.info.worker_id());
    if constexpr (std::is_same_v<S, DecodeSlot>) {
      if (slot.info.has_local_prefill()) listener_.on_lost(slot.info.local_prefill().worker_id());
    }
  }

  template <typename S>
  void Suspect(const std::shared_ptr<S>& slot, const std::string& worker_id) {
    if (!slot->alive || slot->info.worker_id() != worker_id) return;
    slot->suspect = true;
    Rebuild();
    PollNow(slot, worker_id);
  }

  template <typename S>
  void PollNow(const std::shared_ptr<S>& slot, const std::string& worker_id) {
    if (!slot->alive || slot->info.worker_id() != worker_id) return;
    if (slot->polling || stopped_) return;
    slot->timer->cancel();
    Poll(slot);
  }

  // A prefill worker that no longer lists a peer, or lists another channel to it, has closed the connection that is
  // known here (it had an error): open it again, or hear of the other one.
  void ForgetDroppedPeers(PrefillSlot& slot, Clock::time_point asked_at) {
    const auto& peers = slot.info.connected_peers();
    for (auto& [key, connection] : connections_) {
      if (key.first != slot.info.worker_id() || !connection.ready || connection.ready_since >= asked_at) continue;
      const auto& channels = slot.info.connected_channels();
      const bool by_channel = channels.size() == peers.size();  // else a worker of an earlier version
      connection.ready = false;
      for (int i = 0; i < peers.size(); ++i)
        connection.ready |=
            peers[i] == key.second && (!by_channel || channels[i] == connection.link.writer.channel_id());
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
    const absl::Status wire = wire::CheckVersions(slot.info.wire(), "worker " + slot.info.worker_id(), "this router");
    const bool agrees =
        wire.ok() && same_model && same_layout && model.head_class_digest() == reference_.head_class_digest();
    if (!wire.ok() && !slot.mismatch_logged) {
      slot.mismatch_logged = true;
      log::Error("router.worker_excluded", log::F("address", slot.address), log::F("status", wire));
    }
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
    snapshot->model = FleetModelOf(reference_);
    const bool skip_silent[] = {SomeAnswer(prefill_), SomeAnswer(decode_)};
    for (auto& slot : decode_) {
      if (!IsUsable(*slot) || (slot->silent && skip_silent[1])) continue;
      snapshot->decode.push_back(WorkerView(*slot));
      if (slot->info.has_local_prefill()) snapshot->local.push_back(LocalWorkerView(*slot));
    }
    for (auto& slot : prefill_) {
      if (!IsUsable(*slot)) continue;
      for (auto& peer : decode_) {
        if (peer->alive && peer->listed && Agrees(*peer)) EnsureConnected(*slot, *peer);
      }
      if (!(slot->silent && skip_silent[0])) snapshot->prefill.push_back(ViewOf(*slot));
    }
    alive_prefill_.Set(static_cast<double>(snapshot->prefill.size()));
    alive_decode_.Set(static_cast<double>(snapshot->decode.size()));
    local_prefill_.Set(static_cast<double>(snapshot->local.size()));
    had_pair_ = had_pair_ || snapshot->HasUsablePair();
    snapshot->had_pair = had_pair_;
    Publish(std::move(snapshot));
  }

  template <typename S>
  bool IsUsable(S& slot) {
    return slot.alive && slot.listed && !slot.suspect && Agrees(slot);
  }

  // One that has not answered its last poll in time gets nothing new, unless none has.
  template <typename S>
  bool SomeAnswer(const std::vector<std::shared_ptr<S>>& slots) {
    return std::any_of(slots.begin(), slots.end(), [&](const auto& slot) { return IsUsable(*slot) && !slot->silent; });
  }

  PrefillView ViewOf(const PrefillSlot& slot) const {
    PrefillView view = WorkerView(slot);
    for (const auto& [key, connection] : connections_) {
      const bool ours = key.first == view.worker_id && connection.prefill_epoch == view.epoch;
      if (ours && connection.ready) view.peers[key.second] = connection.link;
    }
    return view;
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
      PeerLink link{.transport = finished.response.transport(),
                    .bytes_per_s = finished.response.bytes_per_s(),
                    .write_s = finished.response.write_seconds(),
                    .writer = finished.response.writer()};
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
  prometheus::Gauge& local_prefill_;
  prometheus::Gauge& members_prefill_;
  prometheus::Gauge& members_decode_;
  prometheus::Counter& lost_refused_;
  prometheus::Counter& lost_silent_;
  prometheus::Counter& lost_restarted_;
  prometheus::Histogram& silence_;
  std::shared_ptr<membership::Discovery> discovery_;
  using Life = std::pair<std::string, uint64_t>;  // worker_id, epoch
  mutable std::mutex lives_mutex_;                // guards the two below
  std::map<Life, Clock::time_point> answered_;    // for living workers: when the last answered poll was sent
  std::deque<Life> lost_;
  // All below: strand_ only.
  std::vector<std::shared_ptr<PrefillSlot>> prefill_;
  std::vector<std::shared_ptr<DecodeSlot>> decode_;
  std::map<std::pair<std::string, std::string>, Connection> connections_;  // by (prefill, decode) worker_id
  v1::ModelIdentity reference_;
  Listener listener_;
  bool had_pair_ = false;
  bool stopped_ = false;
};

}  // namespace

std::shared_ptr<Fleet> Fleet::Create(boost::asio::io_context& io, FleetOptions options,
                                     std::shared_ptr<CallTracker> calls, Metrics& metrics) {
  return std::make_shared<PollingFleet>(io, std::move(options), std::move(calls), metrics);
}

}  // namespace spl::router
