// Which chunk to give up first: GreedyDual-Size-Frequency (Cherkasova, 1998), with pins.
//
//   value(chunk)    = seconds to compute it again × (1 + reads) ÷ bytes
//   priority(chunk) = age of the tier when it was last used + value
//   age of the tier = priority of the last chunk that was evicted
//
// So a chunk that is dear for its size, or read often, stays longer, and what was valuable once but is not used any
// more is overtaken by the age. With equal costs and sizes and one read each it is least recently used.
#pragma once

#include <cstdint>
#include <set>

#include "services/chunk/chunk.h"
#include "services/kvstore/chunk_catalog.h"

namespace spl::kvstore {

// The order of one tier. Not thread-safe: the tier's lock guards it. Borrows the records of what is in it. Cost of each
// change: logarithmic.
class EvictionOrder {
 public:
  struct Item {
    chunk::Pin pin = chunk::Pin::kNone;
    double priority = 0;
    uint64_t turn = 0;  // of the last change: the oldest of equals goes first
    const ChunkRecord* record = nullptr;
    bool operator<(const Item& other) const {
      if (pin != other.pin) return pin < other.pin;
      if (priority != other.priority) return priority < other.priority;
      return turn < other.turn;
    }
  };
  using Position = std::set<Item>::iterator;

  // `pin` is how this tier treats the chunk: a tier that keeps a copy of what another holds pinned may give it up.
  Position Add(const ChunkRecord& record, chunk::Pin pin);
  // With the priority that an earlier process gave it.
  Position Restore(const ChunkRecord& record, chunk::Pin pin, double priority);
  Position Touch(Position position, chunk::Pin pin);  // it was used, or counts as used
  Position SetPin(Position position, chunk::Pin pin);
  void Remove(Position position) { items_.erase(position); }
  // It makes room, and is removed next: the tier has aged.
  void AgeTo(Position position);
  // What Add would give.
  double PriorityOf(const ChunkRecord& record) const;

  // Unpinned ones, least valuable first, then soft pins. Hard pins stand at the end: stop there.
  Position begin() const { return items_.begin(); }
  Position end() const { return items_.end(); }
  static bool Evictable(Position position) { return position->pin != chunk::Pin::kHard; }
  size_t size() const { return items_.size(); }
  // After a restart: new chunks must not count as older than all restored ones.
  void ResumeAge();
  double age() const { return age_; }

 private:
  std::set<Item> items_;
  double age_ = 0;
  uint64_t next_turn_ = 0;
};

}  // namespace spl::kvstore
