#include "services/prefill_work/agreement_records.h"

#include <algorithm>
#include <cmath>

namespace spl::prefill {
namespace {

std::string KeyOf(const chunk::Digest& namespace_key, std::string_view method) {
  std::string key(namespace_key.begin(), namespace_key.end());
  return key.append(method);
}

// Factor by which a comparison counts less with each one that follows.
double Fading() { return std::exp2(-1 / AgreementRecords::kHalfLife); }

}  // namespace

void AgreementRecords::Observe(const chunk::Digest& namespace_key, std::string_view method, bool agrees) {
  std::string key = KeyOf(namespace_key, method);
  std::lock_guard lock(mutex_);
  auto found = by_key_.find(key);
  if (found == by_key_.end()) {
    if (records_.size() >= max_records_) {
      by_key_.erase(records_.back().key);
      records_.pop_back();
      ++num_forgotten_;
    }
    records_.push_front({.key = key});
    found = by_key_.emplace(std::move(key), records_.begin()).first;
  }
  records_.splice(records_.begin(), records_, found->second);
  Record& record = records_.front();
  record.weight = record.weight * Fading() + 1;
  record.agreed = record.agreed * Fading() + (agrees ? 1 : 0);
  const double share = record.agreed / record.weight;
  const double low = engine::WilsonLow(share, record.weight), high = engine::WilsonHigh(share, record.weight);
  const bool may_rise = ++record.count % kBlock == 0;
  record.low = may_rise ? low : std::min(record.low, low);
  // Among the first comparisons a single failure would prove a method bad.
  if (record.count >= kBlock) record.high = may_rise ? high : std::min(record.high, high);
}

engine::Agreement AgreementRecords::Of(const chunk::Digest& namespace_key, std::string_view method) const {
  std::lock_guard lock(mutex_);
  const auto found = by_key_.find(KeyOf(namespace_key, method));
  if (found == by_key_.end()) return {};
  records_.splice(records_.begin(), records_, found->second);
  const Record& record = records_.front();
  return {record.weight, record.agreed / record.weight, record.low, record.high};
}

double AgreementRecords::provable() const { return engine::WilsonLow(1, 1 / (1 - Fading())); }

AgreementRecords::Stats AgreementRecords::stats() const {
  std::lock_guard lock(mutex_);
  return {records_.size(), num_forgotten_};
}

}  // namespace spl::prefill
