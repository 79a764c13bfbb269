#include "services/kvstore/namespace_table.h"

#include <algorithm>

#include "services/base/ids.h"
#include "services/base/status.h"

namespace spl::kvstore {
namespace {

constexpr size_t kMaxNameBytes = 256;
constexpr int64_t kMaxOfOneOwner = 1'000;
constexpr uint64_t kMaxTtlSeconds = 100ull * 366 * 24 * 3600;

uint64_t UnixMs(const Clock& clock) {
  const auto since = clock.WallNow().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(since).count());
}

bool HasChunks(const std::weak_ptr<Namespace>& weak) {
  const std::shared_ptr<Namespace> dead = weak.lock();
  return dead != nullptr && dead->stat().num_chunks > 0;
}

absl::Status Unknown(const chunk::Digest& id) {
  return Errorf(absl::StatusCode::kNotFound, "namespace {} does not exist; create it first", HexEncode(id));
}

}  // namespace

absl::Status CheckSettings(const NamespaceSettings& settings) {
  if (settings.name.size() > kMaxNameBytes) {
    return InvalidArgument("settings.name has {} bytes, at most {}", settings.name.size(), kMaxNameBytes);
  }
  if (settings.owner.size() > kMaxNameBytes) {
    return InvalidArgument("settings.owner has {} bytes, at most {}", settings.owner.size(), kMaxNameBytes);
  }
  if (settings.ttl_seconds > kMaxTtlSeconds) {
    return InvalidArgument("settings.ttl_seconds {} is more than {}; 0 means for ever", settings.ttl_seconds,
                           kMaxTtlSeconds);
  }
  return absl::OkStatus();
}

Namespace::Namespace(const NamespaceRow& row, bool implicit) : id(row.id), incarnation(row.incarnation) {
  Apply(row.settings, row.created_ms);
  implicit_ = implicit;
}

void Namespace::Apply(const NamespaceSettings& settings, uint64_t created_ms) {
  std::lock_guard lock(mutex_);
  settings_ = settings;
  created_ms_ = created_ms;
  implicit_ = false;
  ttl_ms_.store(settings.ttl_seconds * 1000);
}

std::string Namespace::Label() const {
  const std::string hex = HexEncode(id);
  return settings_.name.empty() ? hex : fmt::format("'{}' ({})", settings_.name, hex);
}

absl::Status Namespace::Charge(uint64_t bytes, bool enforce) {
  std::lock_guard lock(mutex_);
  if (enforce && settings_.quota_chunks != 0 && num_chunks_ >= settings_.quota_chunks) {
    return Errorf(absl::StatusCode::kResourceExhausted,
                  "namespace {} holds {} chunks of its quota of {}; raise the quota or delete chunks", Label(),
                  num_chunks_, settings_.quota_chunks);
  }
  if (enforce && settings_.quota_bytes != 0 &&
      (bytes > settings_.quota_bytes || bytes_ > settings_.quota_bytes - bytes)) {
    return Errorf(
        absl::StatusCode::kResourceExhausted,
        "namespace {} holds {} bytes of its quota of {}, {} more do not fit; raise the quota or delete chunks", Label(),
        bytes_, settings_.quota_bytes, bytes);
  }
  ++num_chunks_;
  bytes_ += bytes;
  return absl::OkStatus();
}

bool Namespace::Discharge(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  --num_chunks_;
  bytes_ -= bytes;
  return implicit_ && num_chunks_ == 0;
}

chunk::Pin Namespace::default_pin() const {
  std::lock_guard lock(mutex_);
  return settings_.pin;
}

Namespace::Stat Namespace::stat() const {
  std::lock_guard lock(mutex_);
  return {{id, incarnation, created_ms_, settings_}, implicit_, num_chunks_, bytes_};
}

NamespaceTable::NamespaceTable(const Clock& clock) : clock_(clock) {
  NamespaceRow row;
  row.id = chunk::kDefaultNamespace;
  row.settings.name = "default";
  living_[row.id] = std::make_shared<Namespace>(row, true);
}

void NamespaceTable::Restore(const NamespaceRow& row) {
  std::lock_guard lock(mutex_);
  last_incarnation_ = std::max(last_incarnation_, row.incarnation);
  living_[row.id] = std::make_shared<Namespace>(row, false);
}

std::shared_ptr<Namespace> NamespaceTable::Adopt(const chunk::Digest& id, uint64_t incarnation) {
  std::lock_guard lock(mutex_);
  last_incarnation_ = std::max(last_incarnation_, incarnation);
  const auto found = living_.find(id);
  if (found != living_.end()) return found->second;
  NamespaceRow row;
  row.id = id;
  row.incarnation = incarnation;
  return living_[id] = std::make_shared<Namespace>(row, true);
}

// Greater than any before, also across a restart that has forgotten the latest: the wall clock moved on since.
uint64_t NamespaceTable::NextIncarnationLocked() {
  last_incarnation_ = std::max(last_incarnation_ + 1, UnixMs(clock_));
  return last_incarnation_;
}

std::shared_ptr<Namespace> NamespaceTable::MakeLocked(const chunk::Digest& id) {
  NamespaceRow row;
  row.id = id;
  row.incarnation = NextIncarnationLocked();
  row.created_ms = UnixMs(clock_);
  return living_[id] = std::make_shared<Namespace>(row, true);
}

absl::StatusOr<std::shared_ptr<Namespace>> NamespaceTable::Use(const chunk::Digest& id, bool required) {
  std::lock_guard lock(mutex_);
  const auto found = living_.find(id);
  if (found != living_.end()) {
    if (required && id != chunk::kDefaultNamespace && found->second->stat().implicit) return Unknown(id);
    return found->second;
  }
  if (required) return Unknown(id);
  return MakeLocked(id);
}

absl::StatusOr<Namespace::Stat> NamespaceTable::Create(const chunk::Digest& id, const NamespaceSettings& settings) {
  SPLICE_RETURN_IF_ERROR(CheckSettings(settings));
  std::lock_guard lock(mutex_);
  auto found = living_.find(id);
  if (id == chunk::kDefaultNamespace || (found != living_.end() && !found->second->stat().implicit)) {
    return Errorf(absl::StatusCode::kAlreadyExists, "namespace {} exists; change it with SetNamespace", HexEncode(id));
  }
  const auto has_owner = [&](const auto& named) {
    const Namespace::Stat stat = named.second->stat();
    return !stat.implicit && stat.row.settings.owner == settings.owner;
  };
  if (!settings.owner.empty() && std::count_if(living_.begin(), living_.end(), has_owner) >= kMaxOfOneOwner) {
    return Errorf(absl::StatusCode::kResourceExhausted, "'{}' has {} namespaces, the limit; delete some",
                  settings.owner, kMaxOfOneOwner);
  }
  // Chunks that were stored before the namespace was created keep its incarnation, and so stay.
  const uint64_t incarnation = found != living_.end() ? found->second->incarnation : NextIncarnationLocked();
  const NamespaceRow row{id, incarnation, UnixMs(clock_), settings};
  if (storage_ != nullptr) SPLICE_RETURN_IF_ERROR(storage_->SaveNamespace(row));
  if (found == living_.end()) found = living_.emplace(id, std::make_shared<Namespace>(row, false)).first;
  found->second->Apply(settings, row.created_ms);
  return found->second->stat();
}

absl::StatusOr<Namespace::Stat> NamespaceTable::Set(const chunk::Digest& id, const NamespaceSettings& settings) {
  SPLICE_RETURN_IF_ERROR(CheckSettings(settings));
  std::lock_guard lock(mutex_);
  const auto found = living_.find(id);
  if (found == living_.end()) return Unknown(id);
  const Namespace::Stat before = found->second->stat();
  if (before.implicit && id != chunk::kDefaultNamespace) return Unknown(id);
  const NamespaceRow row{id, before.row.incarnation, before.row.created_ms, settings};
  if (storage_ != nullptr) SPLICE_RETURN_IF_ERROR(storage_->SaveNamespace(row));
  found->second->Apply(settings, row.created_ms);
  return found->second->stat();
}

absl::StatusOr<Namespace::Stat> NamespaceTable::Stat(const chunk::Digest& id) const {
  std::lock_guard lock(mutex_);
  const auto found = living_.find(id);
  if (found == living_.end()) return Unknown(id);
  return found->second->stat();
}

std::vector<Namespace::Stat> NamespaceTable::List(const std::string& owner) const {
  std::vector<Namespace::Stat> stats;
  std::lock_guard lock(mutex_);
  for (const auto& named : living_) {
    stats.push_back(named.second->stat());
    if (!owner.empty() && stats.back().row.settings.owner != owner) stats.pop_back();
  }
  return stats;
}

absl::StatusOr<std::shared_ptr<Namespace>> NamespaceTable::Delete(const chunk::Digest& id) {
  if (id == chunk::kDefaultNamespace) {
    return InvalidArgument("the default namespace cannot be deleted; delete its chunks or set a TTL");
  }
  std::lock_guard lock(mutex_);
  const auto found = living_.find(id);
  if (found == living_.end()) return Unknown(id);
  std::shared_ptr<Namespace> dead = found->second;
  if (storage_ != nullptr) SPLICE_RETURN_IF_ERROR(storage_->BuryNamespace(id, dead->incarnation));
  dead->Kill();
  living_.erase(found);
  std::erase_if(buried_, [](const std::weak_ptr<Namespace>& weak) { return !HasChunks(weak); });
  buried_.push_back(dead);
  return dead;
}

// Nobody gets a new reference but through the table, under its lock: two are the table's and the caller's.
void NamespaceTable::ForgetIfUnused(std::shared_ptr<Namespace> last) {
  std::lock_guard lock(mutex_);
  const auto found = living_.find(last->id);
  if (found == living_.end() || found->second != last || last.use_count() > 2 || last->id == chunk::kDefaultNamespace)
    return;
  if (const Namespace::Stat stat = last->stat(); stat.implicit && stat.num_chunks == 0) living_.erase(found);
}

size_t NamespaceTable::size() const {
  std::lock_guard lock(mutex_);
  return living_.size();
}

bool NamespaceTable::NeedsSweep() const {
  std::lock_guard lock(mutex_);
  return std::any_of(living_.begin(), living_.end(), [](const auto& named) { return named.second->has_ttl(); }) ||
         std::any_of(buried_.begin(), buried_.end(), HasChunks);
}

}  // namespace spl::kvstore
