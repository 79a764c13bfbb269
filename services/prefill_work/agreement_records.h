// Records how often methods gave exact's first token, for each namespace and method
// (docs/decisions/0018-auto-and-the-quality-contract.md).
#pragma once

#include <cstdint>
#include <list>
#include <mutex>
#include <string>
#include <unordered_map>

#include "services/engine/methods/agreement.h"

namespace spl::prefill {

// Any thread: one mutex, which no call holds longer than a lookup.
class AgreementRecords final : public engine::AgreementSource {
 public:
  // A comparison counts half as much after so many others. A shorter one could not prove 0.99, a longer one would take
  // longer to see that a method answers badly, or well again.
  static constexpr double kHalfLife = 500;
  // The bounds that methods are judged by rise after so many comparisons, and are not known before. They fall at once.
  static constexpr int kBlock = 32;
  // A record takes some 500 bytes.
  static constexpr size_t kMaxRecords = 4096;

  explicit AgreementRecords(size_t max_records = kMaxRecords) : max_records_(max_records) {}

  void Observe(const chunk::Digest& namespace_key, std::string_view method, bool agrees);
  engine::Agreement Of(const chunk::Digest& namespace_key, std::string_view method) const override;
  double provable() const override;

  struct Stats {
    size_t num_records = 0;
    uint64_t num_forgotten = 0;  // least recently used ones that made room
  };
  Stats stats() const;

 private:
  struct Record {
    std::string key;
    double weight = 0, agreed = 0;
    uint64_t count = 0;
    double low = 0, high = 1;
  };
  using Records = std::list<Record>;

  const size_t max_records_;
  mutable std::mutex mutex_;  // guards all below
  mutable Records records_;   // the most recently used first
  std::unordered_map<std::string, Records::iterator> by_key_;
  uint64_t num_forgotten_ = 0;
};

}  // namespace spl::prefill
