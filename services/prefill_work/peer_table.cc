#include "services/prefill_work/peer_table.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cstring>

#include "services/base/check.h"
#include "services/base/ids.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "services/wire/convert.h"
#include "services/wire/version.h"

namespace spl::prefill {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMaxWaiting = 1024;
constexpr size_t kMaxWaitingForOne = 64;
constexpr size_t kMaxPeers = 1024;
// So many hung decode workers at once delay the connects of others.
constexpr int kNumThreads = 8;
constexpr std::chrono::seconds kConnectTimeout{5};
constexpr std::chrono::seconds kCloseTimeout{5};
constexpr std::chrono::milliseconds kIdleWait{200};

}  // namespace

std::unique_ptr<PageSender> Peer::MakeSender() const {
  if (device_pool != nullptr) return MakeDeviceSender(*device_pool);
  const bool to_landing_pages = !endpoint.device_handle().empty();
  if (mapped != nullptr) return MakeMappedSender(*channel, to_landing_pages);
  if (staging != nullptr) return MakeStagedSender(*channel, *staging, to_landing_pages);
  return MakeHostSender(*channel, to_landing_pages);
}

std::string Peer::channel_address() const {
  return device_pool == nullptr || !channel->mapped_memory().empty() ? channel->local_address() : "";
}

void Peer::Close() const {
  if (device_pool == nullptr) (void)channel->Close(kCloseTimeout);
  if (mapped != nullptr) mapped->Release();
}

PeerTable::PeerTable(transport::KvTransport& transport, std::shared_ptr<const engine::Model> model,
                     const PeerOptions& options)
    : transport_(transport), model_(std::move(model)), options_(options), tasks_(kMaxWaiting) {
  for (int i = 0; i < kNumThreads; ++i) threads_.emplace_back([this] { Loop(); });
}

PeerTable::~PeerTable() { SPLICE_CHECK(threads_.empty(), "Stop() was not called"); }

absl::Status PeerTable::Connect(const v1::DecodeEndpoint& endpoint, Done done) {
  if (tasks_.TryPush({endpoint, std::move(done)})) return absl::OkStatus();
  return tasks_.closed() ? absl::UnavailableError("the prefill worker is stopping")
                         : absl::ResourceExhaustedError("too many decode workers wait to be connected");
}

absl::StatusOr<std::shared_ptr<const Peer>> PeerTable::Find(const std::string& worker_id, uint64_t epoch) const {
  std::lock_guard lock(mutex_);
  const auto it = peers_.find({worker_id, epoch});
  if (it == peers_.end() || !it->second->usable())
    return Errorf(absl::StatusCode::kUnavailable, "no live KV connection to decode worker '{}' (epoch {:016x})",
                  worker_id, epoch);
  return it->second;
}

std::vector<PeerTable::Connected> PeerTable::connected() const {
  std::lock_guard lock(mutex_);
  std::vector<Connected> connected;
  for (const auto& [key, peer] : peers_) {
    if (peer->usable()) connected.push_back({key.first, peer->channel_id});
  }
  return connected;
}

void PeerTable::Loop() {
  while (true) {
    std::optional<Task> task = tasks_.Pop(kIdleWait);
    if (task)
      ConnectInTurn(std::move(*task));
    else if (tasks_.closed())
      return;
    else
      CloseLost();
  }
}

// A connect to a worker that another thread is connecting waits for that thread, which takes it over.
void PeerTable::ConnectInTurn(Task task) {
  const std::string id = task.endpoint.worker_id();
  {
    std::unique_lock lock(mutex_);
    const auto [it, is_first] = connecting_.try_emplace(id);
    if (!is_first) {
      if (it->second.size() < kMaxWaitingForOne) {
        it->second.push_back(std::move(task));
        return;
      }
      lock.unlock();
      task.done(Errorf(absl::StatusCode::kResourceExhausted, "too many connects to decode worker '{}' wait", id));
      return;
    }
  }
  while (true) {
    task.done(ConnectNow(task.endpoint));
    std::lock_guard lock(mutex_);
    const auto it = connecting_.find(id);
    if (it->second.empty()) {
      connecting_.erase(it);
      return;
    }
    task = std::move(it->second.front());
    it->second.pop_front();
  }
}

// At once, not when the next one connects: as long as a channel is there, its decode worker must take it for one that
// may write.
void PeerTable::CloseLost() {
  std::vector<std::shared_ptr<const Peer>> lost;
  {
    std::lock_guard lock(mutex_);
    std::erase_if(peers_, [&](const auto& entry) {
      if (entry.second->usable()) return false;
      lost.push_back(entry.second);
      return true;
    });
  }
  for (const auto& peer : lost) peer->Close();
}

absl::StatusOr<std::shared_ptr<const Peer>> PeerTable::ConnectNow(const v1::DecodeEndpoint& endpoint) {
  if (auto peer = Find(endpoint.worker_id(), endpoint.epoch()); peer.ok()) return peer;
  CloseLost();  // an earlier channel to it among others
  {
    std::lock_guard lock(mutex_);
    if (peers_.size() >= kMaxPeers)
      return Errorf(absl::StatusCode::kResourceExhausted, "{} decode workers are connected, the limit", peers_.size());
  }
  SPLICE_RETURN_IF_ERROR(wire::CheckVersions(endpoint.wire(), fmt::format("decode worker '{}'", endpoint.worker_id()),
                                             "this prefill worker"));
  SPLICE_RETURN_IF_ERROR(wire::CheckLayout(endpoint.layout_digest(), *model_));
  SPLICE_RETURN_IF_ERROR(wire::CheckHeadClasses(endpoint.head_class_digest(), *model_,
                                                fmt::format("decode worker '{}'", endpoint.worker_id())));
  if (endpoint.page_bytes() != model_->page_bytes())
    return Errorf(absl::StatusCode::kFailedPrecondition, "decode worker '{}' has pages of {} bytes, ours have {}",
                  endpoint.worker_id(), endpoint.page_bytes(), model_->page_bytes());
  const transport::RemoteMemory remote{endpoint.ucx_address(), endpoint.pool_rkey(), endpoint.pool_base(),
                                       endpoint.pool_bytes(), endpoint.host_id()};
  auto peer = std::make_shared<Peer>();
  peer->endpoint = endpoint;
  const RandomId random = RandomId::Make();
  std::memcpy(&peer->channel_id, random.bytes.data(), sizeof(peer->channel_id));
  if (options_.open_memory) {
    SPLICE_ASSIGN_OR_RETURN(peer->channel, options_.open_memory(remote));
  } else {
    SPLICE_ASSIGN_OR_RETURN(peer->channel, transport_.Connect(remote, kConnectTimeout));
  }
  SPLICE_ASSIGN_OR_RETURN(transport::WriteCost cost, SelfTest(*peer->channel, endpoint));
  const kernels::Backend& backend = model_->backend();
  std::string why_not_device = "this worker's KV is in host memory";
  if (!backend.host_memory()) {
    peer->staging = options_.staging;
    why_not_device = "its KV is in host memory";
    if (!endpoint.device_handle().empty() && options_.use_device) {
      auto pool = Import(endpoint);
      if (pool.ok()) {
        SPLICE_ASSIGN_OR_RETURN(cost, DeviceSelfTest(**pool));
        peer->device_pool = *std::move(pool);
      } else {
        why_not_device = MessageOf(pool.status());
      }
    }
    if (peer->device_pool == nullptr && !peer->channel->mapped_memory().empty()) {
      auto pinned = PinnedPeerMemory::Create(peer->channel->mapped_memory(), backend);
      if (pinned.ok())
        peer->mapped = *std::move(pinned);
      else
        log::Warning("prefill.peer_not_page_locked", log::F("decode", endpoint.worker_id()),
                     log::F("why", pinned.status()));
    }
  }
  if (options_.require_device && peer->device_pool == nullptr)
    return Errorf(absl::StatusCode::kFailedPrecondition, "decode worker '{}' cannot be written from GPU to GPU: {}",
                  endpoint.worker_id(), why_not_device);
  peer->bytes_per_s = cost.bytes_per_s;
  peer->write_s = cost.write_s;
  const std::string carrier = peer->carrier();
  if (peer->bytes_per_s < options_.min_bytes_per_s)
    return Errorf(absl::StatusCode::kFailedPrecondition,
                  "KV reaches decode worker '{}' over {} at {:.2f} GB/s, less than the {:.2f} GB/s that "
                  "--kv-min-gb-per-s asks for",
                  endpoint.worker_id(), carrier, peer->bytes_per_s / 1e9, options_.min_bytes_per_s / 1e9);
  OpenCalls(*peer);
  log::Info("prefill.peer_connected", log::F("decode", endpoint.worker_id()), log::F("ucx", endpoint.ucx_address()),
            log::F("carrier", carrier), log::F("GB_per_s", peer->bytes_per_s / 1e9),
            log::F("write_us", peer->write_s * 1e6));
  {
    std::lock_guard lock(mutex_);
    peers_[{endpoint.worker_id(), endpoint.epoch()}] = peer;
  }
  return std::shared_ptr<const Peer>(peer);
}

void PeerTable::OpenCalls(Peer& peer) const {
  const std::string& address = peer.endpoint.grpc_address();
  peer.decode = v1::Decode::NewStub(options_.open_calls ? options_.open_calls(address)
                                                        : MakePeerChannel(address, options_.tls.get()));
  peer.commit = options_.commit;
}

// Proves the path before a request depends on it, and measures it.
absl::StatusOr<transport::WriteCost> PeerTable::SelfTest(transport::KvChannel& channel,
                                                         const v1::DecodeEndpoint& endpoint) {
  const size_t bytes = std::min<uint64_t>(endpoint.scratch_bytes(), 1 << 20);
  if (bytes < transport::kMinScratchBytes) return transport::WriteCost{};
  return transport::MeasureWriteCost(channel, endpoint.scratch_offset(), bytes, kConnectTimeout);
}

absl::StatusOr<std::unique_ptr<RemotePool>> PeerTable::Import(const v1::DecodeEndpoint& endpoint) {
  std::vector<std::string> handles = {endpoint.device_handle()};
  handles.insert(handles.end(), endpoint.more_device_handles().begin(), endpoint.more_device_handles().end());
  auto pool = std::make_unique<RemotePool>();
  if (endpoint.device_pool_pages() == 0 || endpoint.device_pool_pages() * handles.size() > INT32_MAX)
    return InvalidArgument("decode worker '{}' says that its pool has {} pages on each of {} GPUs",
                           endpoint.worker_id(), endpoint.device_pool_pages(), handles.size());
  pool->pages_per_part = static_cast<uint32_t>(endpoint.device_pool_pages());
  for (const kernels::Backend* backend : model_->backends()) {
    auto& parts = pool->parts.emplace_back();
    for (const std::string& handle : handles) {
      SPLICE_ASSIGN_OR_RETURN(parts.emplace_back(), backend->Import(handle));
      if (parts.back()->size() < pool->pages_per_part * uint64_t{endpoint.page_bytes()})
        return InvalidArgument("decode worker '{}' has {} bytes on a GPU for {} pages of {}", endpoint.worker_id(),
                               parts.back()->size(), pool->pages_per_part, endpoint.page_bytes());
    }
  }
  return pool;
}

// Measures by reading the peer's pool into our own memory, which leaves its contents unchanged. Returns the cost of the
// slowest pair of GPUs.
absl::StatusOr<transport::WriteCost> PeerTable::DeviceSelfTest(const RemotePool& pool) {
  transport::WriteCost slowest;
  for (size_t rank = 0; rank < pool.parts.size(); ++rank) {
    const kernels::Backend& backend = model_->rank(static_cast<int>(rank)).backend();
    const size_t bytes = std::min<size_t>(pool.parts[rank][0]->size(), 64 << 20);
    const size_t page = std::min(model_->page_bytes(), bytes / (2 * transport::kCostPieces));
    SPLICE_ASSIGN_OR_RETURN(const auto scratch, backend.Allocate(bytes));
    auto* const to = static_cast<std::byte*>(scratch->data());
    for (const auto& part : pool.parts[rank]) {
      const auto* const from = static_cast<const std::byte*>(part->data());
      std::vector<kernels::CopyOp> pieces;
      for (size_t i = 0; i < transport::kCostPieces; ++i)
        pieces.push_back({to + 2 * i * page, from + 2 * i * page, page});
      const std::vector<kernels::CopyOp> whole = {{to, from, bytes}};
      SPLICE_ASSIGN_OR_RETURN(const transport::WriteCost cost,
                              transport::MeasureWriteCost(bytes, transport::kCostPieces * page, [&](bool in_pieces) {
                                return backend.Copy(kernels::CopyKind::kWithin, in_pieces ? pieces : whole);
                              }));
      slowest.bytes_per_s =
          slowest.bytes_per_s == 0 ? cost.bytes_per_s : std::min(slowest.bytes_per_s, cost.bytes_per_s);
      slowest.write_s = std::max(slowest.write_s, cost.write_s);
    }
  }
  return slowest;
}

void PeerTable::Stop() {
  tasks_.Close();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  std::map<PeerKey, std::shared_ptr<const Peer>> peers;
  {
    std::lock_guard lock(mutex_);
    peers.swap(peers_);
  }
  for (const auto& [key, peer] : peers) peer->Close();
}

}  // namespace spl::prefill
