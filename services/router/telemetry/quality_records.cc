#include "services/router/telemetry/quality_records.h"

#include <utility>

#include "services/methods/quality.h"

namespace spl::router {

void QualityRecords::Observe(const chunk::Digest& namespace_key, QualityRecord record) {
  const std::string& why = record.choice.why();
  if (why == methods::kNothingToCopy || why == methods::kLittleToGain) return;
  // Copies of which nothing is recovered have a record of their own, which says nothing of others.
  const bool same = why == methods::kSameContext;
  const Key key{namespace_key, record.choice.method() + (same ? " in the same context" : ""), record.worker};
  std::lock_guard lock(mutex_);
  auto found = by_key_.find(key);
  if (found == by_key_.end()) {
    if (entries_.size() >= max_records_) {
      by_key_.erase(entries_.back().key);
      entries_.pop_back();
    }
    entries_.push_front({.key = key, .record = {}});
    found = by_key_.emplace(key, entries_.begin()).first;
  }
  entries_.splice(entries_.begin(), entries_, found->second);
  entries_.front().record = std::move(record);
}

bool QualityRecords::IsClearlyBad(const chunk::Digest& namespace_key, std::string_view method, SteadyTime now) const {
  std::lock_guard lock(mutex_);
  auto next = by_key_.lower_bound({namespace_key, std::string(method), ""});
  for (; next != by_key_.end(); ++next) {
    const auto& [key, known, worker] = next->first;
    if (key != namespace_key || known != method) return false;
    const QualityRecord& record = next->second->record;
    if (record.choice.why() == methods::kClearlyBad && now - record.seen < kVerdictAge) return true;
  }
  return false;
}

std::vector<QualityRecord> QualityRecords::All() const {
  std::lock_guard lock(mutex_);
  std::vector<QualityRecord> records;
  for (const Entry& entry : entries_) records.push_back(entry.record);
  return records;
}

}  // namespace spl::router
