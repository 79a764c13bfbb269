// Prefill workers' records of agreement about methods, as the receipts of this router's requests told them
// (docs/decisions/0018-auto-and-the-quality-contract.md). For operators, and for placement: a worker judges a method
// when a request's KV has been reserved already.
#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "services/base/clock.h"
#include "services/chunk/chunk.h"
#include "spl/v1/common.pb.h"

namespace spl::router {

// The last word of one worker about one method in one namespace.
struct QualityRecord {
  std::string caller;      // whose namespace it is; empty: everybody's, or there are no API keys
  std::string name_space;  // as requests name it; empty: the caller's own
  std::string worker;
  v1::ChoiceReceipt choice;
  SteadyTime seen{};
};

// Owns the records: at most kMaxRecords, the least recently seen goes first. Any thread may call.
class QualityRecords {
 public:
  static constexpr size_t kMaxRecords = 4096;
  // A verdict that no request has confirmed for so long is not acted on: its worker may be gone.
  static constexpr std::chrono::minutes kVerdictAge{10};

  explicit QualityRecords(size_t max_records = kMaxRecords) : max_records_(max_records) {}

  // Takes note of record.choice. Choices that no record decided, for lack of copies or of work to save, say nothing.
  void Observe(const chunk::Digest& namespace_key, QualityRecord record);
  // Whether the last word of some worker is that the method answers badly in this namespace.
  bool IsClearlyBad(const chunk::Digest& namespace_key, std::string_view method, SteadyTime now) const;
  std::vector<QualityRecord> All() const;  // the most recently seen first

 private:
  using Key = std::tuple<chunk::Digest, std::string, std::string>;  // namespace, method, worker
  struct Entry {
    Key key;
    QualityRecord record;
  };

  const size_t max_records_;
  mutable std::mutex mutex_;  // guards all below
  std::list<Entry> entries_;  // the most recently seen first
  std::map<Key, std::list<Entry>::iterator> by_key_;
};

}  // namespace spl::router
