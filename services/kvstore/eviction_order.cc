#include "services/kvstore/eviction_order.h"

#include <algorithm>

namespace spl::kvstore {

double EvictionOrder::PriorityOf(const ChunkRecord& record) const {
  const double reads = 1.0 + record.uses.load(std::memory_order_relaxed);
  return age_ + record.cost_seconds * reads / static_cast<double>(std::max<uint64_t>(record.payload_bytes, 1));
}

EvictionOrder::Position EvictionOrder::Add(const ChunkRecord& record, chunk::Pin pin) {
  return Restore(record, pin, PriorityOf(record));
}

EvictionOrder::Position EvictionOrder::Restore(const ChunkRecord& record, chunk::Pin pin, double priority) {
  return items_.insert({pin, priority, next_turn_++, &record}).first;
}

EvictionOrder::Position EvictionOrder::Touch(Position position, chunk::Pin pin) {
  const ChunkRecord& record = *position->record;
  items_.erase(position);
  return Add(record, pin);
}

EvictionOrder::Position EvictionOrder::SetPin(Position position, chunk::Pin pin) {
  Item item = *position;
  items_.erase(position);
  item.pin = pin;
  return items_.insert(item).first;
}

void EvictionOrder::AgeTo(Position position) { age_ = std::max(age_, position->priority); }

void EvictionOrder::ResumeAge() {
  if (items_.empty()) return;
  // No evicted chunk had a higher priority than one that is left, pins aside.
  double lowest = items_.begin()->priority;
  for (const Item& item : items_) lowest = std::min(lowest, item.priority);
  age_ = std::max(age_, lowest);
}

}  // namespace spl::kvstore
