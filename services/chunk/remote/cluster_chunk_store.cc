#include "services/chunk/remote/cluster_chunk_store.h"

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "services/base/address.h"
#include "services/base/log.h"
#include "services/base/periodic.h"
#include "services/base/status.h"
#include "services/base/trace.h"
#include "services/chunk/remote/store_call.h"
#include "services/chunk/rendezvous.h"

namespace spl::chunk {
namespace {

using Deadline = std::chrono::steady_clock::time_point;

constexpr std::chrono::milliseconds kProbePeriod{100};
constexpr size_t kPinnedCopies = 2;

// About one chunk or a moment: a miss.
bool IsMiss(const absl::Status& status) {
  return status.code() == absl::StatusCode::kDataLoss || status.code() == absl::StatusCode::kResourceExhausted;
}

class Cluster final : public ClusterChunkStore {
 public:
  Cluster(std::vector<Member> members, const ClusterStoreOptions& options);
  ~Cluster() override { prober_->Stop(); }

  absl::StatusOr<size_t> CountLeading(std::span<const ChunkKey> keys, Deadline deadline) override;
  absl::StatusOr<size_t> GetLeading(std::span<const ChunkKey> keys, Deadline deadline,
                                    const std::function<bool(Chunk&&)>& sink) override;
  absl::StatusOr<size_t> FetchLeading(std::span<const ChunkKey> keys, Deadline deadline, const PlaceFn& place,
                                      const FetchedFn& sink) override;
  absl::Status Put(std::span<const Chunk> chunks, Deadline deadline) override {
    return PutWith(PointersTo(chunks), {}, deadline).status();
  }
  absl::StatusOr<PutReport> PutWith(std::span<const Chunk* const> chunks, const PutOptions& options,
                                    Deadline deadline) override;
  size_t num_members_up() const override;

 private:
  struct Node {
    Node(Member member, const ClusterStoreOptions& options)
        : name(std::move(member.name)), store(std::move(member.store)), breaker(options.breaker, *options.clock) {}
    const std::string name;
    const std::unique_ptr<ChunkStore> store;
    CircuitBreaker breaker;
    prometheus::Gauge* up = nullptr;
    prometheus::Counter* failures = nullptr;
  };
  using Lost = std::set<size_t>;                         // nodes that this call has given up
  using Shares = std::map<size_t, std::vector<size_t>>;  // node → indices of its keys, in order

  std::vector<size_t> UsableRanking(const ChunkKey& key, const Lost& lost) const;
  // Groups the indices from `from` on by the node to ask. If no node can be asked for an index, it and all later ones
  // are left out.
  Shares ShareOut(std::span<const ChunkKey> keys, size_t from, const Lost& lost) const;
  // Runs `work` for every node, in parallel. Records lost nodes in `lost` and for the breaker. Returns the first
  // failure that is neither a loss nor a miss.
  absl::Status RunAll(const Shares& shares, Lost& lost, Deadline deadline,
                      const std::function<absl::Status(Node&, const std::vector<size_t>&)>& work);
  void Note(Node& node, const absl::Status& status, bool could_have_answered);
  void Probe();

  const ClusterStoreOptions options_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::unique_ptr<Rendezvous> rendezvous_;
  std::unique_ptr<Periodic> prober_;
};

Cluster::Cluster(std::vector<Member> members, const ClusterStoreOptions& options) : options_(options) {
  std::vector<std::string> names;
  for (Member& member : members) {
    names.push_back(member.name);
    nodes_.push_back(std::make_unique<Node>(std::move(member), options));
    if (options.metrics == nullptr) continue;
    Node& node = *nodes_.back();
    node.up = &options.metrics->Gauge("splice_store_node_up", "1 while the chunk store node is asked.",
                                      {{"node", node.name}});
    node.failures = &options.metrics->Counter("splice_store_node_failures_total",
                                              "Calls that the chunk store node did not answer.", {{"node", node.name}});
    node.up->Set(1);
  }
  rendezvous_ = std::make_unique<Rendezvous>(names);
  prober_ = std::make_unique<Periodic>(kProbePeriod, [this] { Probe(); });
}

size_t Cluster::num_members_up() const {
  return static_cast<size_t>(
      std::count_if(nodes_.begin(), nodes_.end(), [](const auto& node) { return node->breaker.closed(); }));
}

void Cluster::Note(Node& node, const absl::Status& status, bool could_have_answered) {
  if (!IsLoss(status)) {
    if (node.breaker.Succeeded()) {
      log::Info("chunk_store.node_up", log::F("node", node.name));
      if (node.up != nullptr) node.up->Set(1);
    }
    return;
  }
  const bool timed_out = status.code() == absl::StatusCode::kDeadlineExceeded;
  if (timed_out && !could_have_answered) return;  // the caller's time was over before the call
  if (node.failures != nullptr) node.failures->Increment();
  if (!node.breaker.Failed(timed_out)) return;
  log::Warning("chunk_store.node_down", log::F("node", node.name), log::F("cause", status));
  if (node.up != nullptr) node.up->Set(0);
}

void Cluster::Probe() {
  const ChunkKey nobody{};
  for (const auto& node : nodes_) {
    if (!node->breaker.TakeProbe()) continue;
    const Deadline deadline = std::chrono::steady_clock::now() + options_.probe_timeout;
    Note(*node, node->store->CountLeading({&nobody, 1}, deadline).status(), true);
  }
}

std::vector<size_t> Cluster::UsableRanking(const ChunkKey& key, const Lost& lost) const {
  std::vector<size_t> ranking = rendezvous_->Rank(key);
  std::erase_if(ranking, [&](size_t i) { return lost.count(i) != 0 || !nodes_[i]->breaker.closed(); });
  return ranking;
}

Cluster::Shares Cluster::ShareOut(std::span<const ChunkKey> keys, size_t from, const Lost& lost) const {
  Shares shares;
  for (size_t i = from; i < keys.size(); ++i) {
    const std::vector<size_t> ranking = UsableRanking(keys[i], lost);
    if (ranking.empty()) break;
    shares[ranking[0]].push_back(i);
  }
  return shares;
}

absl::Status Cluster::RunAll(const Shares& shares, Lost& lost, Deadline deadline,
                             const std::function<absl::Status(Node&, const std::vector<size_t>&)>& work) {
  const bool in_time = std::chrono::steady_clock::now() < deadline;
  std::vector<std::pair<size_t, absl::Status>> results(shares.size());
  std::vector<std::thread> threads;
  const TraceContext& trace = CurrentTrace();
  size_t at = 0;
  for (const auto& [node, indices] : shares) {
    auto& result = results[at++];
    result.first = node;
    const auto run = [&work, &result, &trace, &indices = indices, this] {
      const TraceScope scope(trace);
      result.second = work(*nodes_[result.first], indices);
    };
    if (at == shares.size()) {
      run();  // the last one here
    } else {
      threads.emplace_back(run);
    }
  }
  for (std::thread& thread : threads) thread.join();
  absl::Status problem;
  for (const auto& [node, status] : results) {
    Note(*nodes_[node], status, in_time);
    if (IsLoss(status)) {
      lost.insert(node);
    } else if (!IsMiss(status)) {
      problem.Update(status);
    }
  }
  return problem;
}

std::vector<ChunkKey> Select(std::span<const ChunkKey> keys, const std::vector<size_t>& indices) {
  std::vector<ChunkKey> selected;
  selected.reserve(indices.size());
  for (const size_t i : indices) selected.push_back(keys[i]);
  return selected;
}

absl::StatusOr<size_t> Cluster::CountLeading(std::span<const ChunkKey> keys, Deadline deadline) {
  Lost lost;
  for (;;) {
    const size_t num_lost = lost.size();
    const Shares shares = ShareOut(keys, 0, lost);
    std::mutex mutex;  // guards first_missing
    size_t first_missing = 0;
    for (const auto& share : shares) first_missing = std::max(first_missing, share.second.back() + 1);
    SPLICE_RETURN_IF_ERROR(RunAll(shares, lost, deadline, [&](Node& node, const std::vector<size_t>& indices) {
      const auto count = node.store->CountLeading(Select(keys, indices), deadline);
      std::lock_guard lock(mutex);
      const size_t present = count.ok() ? *count : 0;
      if (present < indices.size()) first_missing = std::min(first_missing, indices[present]);
      return count.status();
    }));
    if (lost.size() == num_lost || std::chrono::steady_clock::now() >= deadline) return first_missing;
  }
}

// Shared by the nodes of one fetch. A chunk that arrives early waits for its turn here, in its caller's memory.
class FetchOrder {
 public:
  FetchOrder(size_t from, size_t end, const ChunkStore::PlaceFn& place, const ChunkStore::FetchedFn& sink)
      : place_(place), sink_(sink), next_(from), end_(end) {}

  Pieces Place(size_t index, const ChunkHeader& header) {
    std::lock_guard lock(mutex_);
    if (index >= end_) return {};
    Pieces pieces = place_(index, header);
    if (pieces.empty()) EndLocked(index);
    return pieces;
  }
  bool Arrived(size_t index, const ChunkHeader& header) {
    std::lock_guard lock(mutex_);
    arrived_[index] = header;
    for (auto first = arrived_.begin(); first != arrived_.end() && first->first == next_ && next_ < end_;
         first = arrived_.erase(first)) {
      if (!sink_(next_, first->second)) {
        EndLocked(next_);
        break;
      }
      ++next_;
    }
    return index < end_;
  }
  // Ends the order: nothing from `index` on is wanted.
  void End(size_t index) {
    std::lock_guard lock(mutex_);
    EndLocked(index);
  }
  size_t next() const {
    std::lock_guard lock(mutex_);
    return next_;
  }
  // True if the order can go on from next(): no node has reported a missing chunk there.
  bool open() const {
    std::lock_guard lock(mutex_);
    return next_ < end_;
  }

 private:
  void EndLocked(size_t index) { end_ = std::min(end_, index); }

  const ChunkStore::PlaceFn& place_;
  const ChunkStore::FetchedFn& sink_;
  mutable std::mutex mutex_;  // guards all below, and serializes the caller's functions
  std::map<size_t, ChunkHeader> arrived_;
  size_t next_;
  size_t end_;
};

absl::StatusOr<size_t> Cluster::FetchLeading(std::span<const ChunkKey> keys, Deadline deadline, const PlaceFn& place,
                                             const FetchedFn& sink) {
  Lost lost;
  size_t from = 0;
  for (;;) {
    const size_t num_lost = lost.size();
    FetchOrder order(from, keys.size(), place, sink);
    const Shares shares = ShareOut(keys, from, lost);
    SPLICE_RETURN_IF_ERROR(RunAll(shares, lost, deadline, [&](Node& node, const std::vector<size_t>& indices) {
      const auto fetched = node.store->FetchLeading(
          Select(keys, indices), deadline,
          [&](size_t i, const ChunkHeader& header) { return order.Place(indices[i], header); },
          [&](size_t i, const ChunkHeader& header) { return order.Arrived(indices[i], header); });
      const size_t num_fetched = fetched.ok() ? *fetched : 0;
      if (fetched.ok() && num_fetched == 0 && std::chrono::steady_clock::now() >= deadline) {
        return Errorf(absl::StatusCode::kDeadlineExceeded, "nothing came in time");  // the breaker counts it
      }
      // A lost node may have its chunks or not: other nodes are asked for its keys.
      if (fetched.ok() && num_fetched < indices.size()) order.End(indices[num_fetched]);
      if (IsMiss(fetched.status())) order.End(indices[0]);
      return fetched.status();
    }));
    from = order.next();
    if (lost.size() == num_lost || !order.open() || std::chrono::steady_clock::now() >= deadline) return from;
  }
}

absl::StatusOr<size_t> Cluster::GetLeading(std::span<const ChunkKey> keys, Deadline deadline,
                                           const std::function<bool(Chunk&&)>& sink) {
  std::map<size_t, Chunk> placed;
  const auto place = [&](size_t index, const ChunkHeader& header) -> Pieces {
    Chunk& chunk = placed[index];
    chunk = {header, std::vector<std::byte>(header.payload_bytes)};
    return {chunk.payload};
  };
  return FetchLeading(keys, deadline, place, [&](size_t index, const ChunkHeader&) {
    Chunk chunk = std::move(placed.at(index));
    placed.erase(index);
    return sink(std::move(chunk));
  });
}

absl::StatusOr<PutReport> Cluster::PutWith(std::span<const Chunk* const> chunks, const PutOptions& options,
                                           Deadline deadline) {
  const size_t num_copies = options.pin == Pin::kNone ? 1 : kPinnedCopies;
  PutReport report;
  for (size_t copy = 0; copy < std::min(num_copies, nodes_.size()); ++copy) {
    std::vector<size_t> todo(chunks.size());
    for (size_t i = 0; i < todo.size(); ++i) todo[i] = i;
    Lost lost;
    while (!todo.empty()) {
      Shares shares;
      for (const size_t i : todo) {
        const std::vector<size_t> ranking = UsableRanking(chunks[i]->header.key, lost);
        if (ranking.size() > copy) {
          shares[ranking[copy]].push_back(i);
        } else if (copy == 0) {
          return Errorf(absl::StatusCode::kUnavailable, "no chunk store of {} answers", nodes_.size());
        }
      }
      std::mutex mutex;  // guards the next two and the report
      absl::Status refused;
      std::vector<size_t> again;
      const absl::Status problem = RunAll(shares, lost, deadline, [&](Node& node, const std::vector<size_t>& indices) {
        std::vector<const Chunk*> share;
        for (const size_t i : indices) share.push_back(chunks[i]);
        const auto stored = node.store->PutWith(share, options, deadline);
        std::lock_guard lock(mutex);
        if (IsLoss(stored.status())) again.insert(again.end(), indices.begin(), indices.end());
        if (IsMiss(stored.status())) refused.Update(stored.status());
        if (stored.ok() && copy == 0) {
          report.num_stored += stored->num_stored;
          report.num_existing += stored->num_existing;
          report.num_durable += stored->num_durable;
        }
        return stored.status();
      });
      SPLICE_RETURN_IF_ERROR(problem);
      SPLICE_RETURN_IF_ERROR(refused);
      if (!again.empty() && std::chrono::steady_clock::now() >= deadline) {
        return Errorf(absl::StatusCode::kDeadlineExceeded, "{} chunks were not stored in time", again.size());
      }
      todo = std::move(again);
    }
  }
  return report;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ParseMemberList(const std::string& addresses) {
  std::vector<std::string> members;
  for (size_t at = 0; at <= addresses.size();) {
    const size_t comma = std::min(addresses.find(',', at), addresses.size());
    SPLICE_ASSIGN_OR_RETURN(const HostPort address, ParseHostPort(addresses.substr(at, comma - at)));
    members.push_back(address.ToString());
    at = comma + 1;
  }
  std::set<std::string> unique(members.begin(), members.end());
  if (unique.size() != members.size()) return InvalidArgument("'{}' names a chunk store twice", addresses);
  return members;
}

std::unique_ptr<ClusterChunkStore> ClusterChunkStore::Create(std::vector<Member> members,
                                                             const ClusterStoreOptions& options) {
  return std::make_unique<Cluster>(std::move(members), options);
}

absl::StatusOr<std::unique_ptr<ClusterChunkStore>> ClusterChunkStore::Connect(const std::string& addresses,
                                                                              const RemoteStoreOptions& remote,
                                                                              const ClusterStoreOptions& options) {
  SPLICE_ASSIGN_OR_RETURN(const std::vector<std::string> names, ParseMemberList(addresses));
  std::vector<Member> members;
  for (const std::string& name : names) {
    SPLICE_ASSIGN_OR_RETURN(std::unique_ptr<RemoteChunkStore> store, RemoteChunkStore::Connect(name, remote));
    members.push_back({name, std::move(store)});
  }
  return Create(std::move(members), options);
}

}  // namespace spl::chunk
