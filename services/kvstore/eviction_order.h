// Order of eviction: GreedyDual-Size-Frequency (Cherkasova, 1998), with pins.
//
//   value(chunk)    = seconds to compute it again × (1 + reads) ÷ bytes
//   priority(chunk) = age of the tier when it was last used + value
//   age of the tier = priority of the last chunk that was evicted
//
// A chunk that is expensive for its size, or read often, stays longer. A chunk that was valuable once but is no longer
// used is overtaken by the age. With equal costs and sizes and one read each, this is least recently used.
#pragma once

#include <cstdint>
#include <set>

#include "services/chunk/chunk.h"
#include "services/kvstore/chunk_catalog.h"

namespace spl::kvstore {

// The order of one tier. Not thread-safe: the tier's lock guards it. Borrows the records of its chunks. Cost of each
// change: logarithmic.
class EvictionOrder {
 public:
  struct Item {
    chunk::Pin pin = chunk::Pin::kNone;
    double priority = 0;
    uint64_t turn = 0;  // number of the last change: of equals, the oldest goes first
    const ChunkRecord* record = nullptr;
    bool operator<(const Item& other) const {
      if (pin != other.pin) return pin < other.pin;
      if (priority != other.priority) return priority < other.priority;
      return turn < other.turn;
    }
  };
  using Position = std::set<Item>::iterator;

  // `pin` is how this tier treats the chunk: a tier with a copy of a chunk that another tier holds pinned may evict its
  // copy.
  Position Add(const ChunkRecord& record, chunk::Pin pin);
  // Adds a chunk with the priority that an earlier process gave it.
  Position Restore(const ChunkRecord& record, chunk::Pin pin, double priority);
  Position Touch(Position position, chunk::Pin pin);  // the chunk was used, or counts as used
  Position SetPin(Position position, chunk::Pin pin);
  void Remove(Position position) { items_.erase(position); }
  // Ages the tier: the chunk at `position` makes room, and the caller removes it next.
  void AgeTo(Position position);
  // The priority that Add would give.
  double PriorityOf(const ChunkRecord& record) const;

  // Unpinned chunks, least valuable first, then soft pins, then hard pins. Stop at the first hard pin.
  Position begin() const { return items_.begin(); }
  Position end() const { return items_.end(); }
  static bool Evictable(Position position) { return position->pin != chunk::Pin::kHard; }
  size_t size() const { return items_.size(); }
  // Call after a restart, so that new chunks do not count as older than all restored ones.
  void ResumeAge();
  double age() const { return age_; }

 private:
  std::set<Item> items_;
  double age_ = 0;
  uint64_t next_turn_ = 0;
};

}  // namespace spl::kvstore
