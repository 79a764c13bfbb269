// Sequences of a SelectingBatch with finished pages in host memory and a hot buffer in the pool.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/common/host_buffer.h"
#include "kernels/common/hot_rows.h"
#include "tests/kernels/support/selecting_batch.h"

namespace spl::kernels::testing {

// The tables of one sequence with one layer, in host memory.
class TestHotBuffer {
 public:
  // Moves the first num_slots / 64 pages of each stream, which become the slots. Everything in them turns to NaN.
  // REQUIRES: that many pages of each stream are finished.
  TestHotBuffer(SelectingBatch& batch, TestSequence& sequence, int32_t num_slots)
      : batch_(batch),
        sequence_(sequence),
        num_slots_(num_slots),
        max_pages_((sequence.max_len + kPageTokens - 1) / kPageTokens) {
    const size_t heads = sequence.streams.size();
    memory_ = AllocateHostBuffer(heads * static_cast<size_t>(max_pages_) * batch.pool().view().page_bytes()).value();
    host_pages_.resize(heads * static_cast<size_t>(max_pages_));
    slot_of_.resize(host_pages_.size() * kPageTokens);
    position_of_.resize(heads * static_cast<size_t>(num_slots));
    listed_at_.resize(position_of_.size());
    for (size_t h = 0; h < heads; ++h) {
      for (int32_t page = 0; page < num_slots / kPageTokens; ++page) {
        const int32_t taken = sequence.streams[h].page_table[static_cast<size_t>(page)];
        Move(h, page);
        slot_pages_.push_back(taken - batch.pool().view().first_page);
      }
    }
  }

  // Copies a finished page to host memory; its place in the pool turns to NaN and leaves the page table.
  void Move(size_t head, int32_t page) {
    int32_t& entry = sequence_.streams[head].page_table[static_cast<size_t>(page)];
    const KvPoolView& pool = batch_.pool().view();
    const size_t at = head * static_cast<size_t>(max_pages_) + static_cast<size_t>(page);
    std::byte* const to = static_cast<std::byte*>(memory_->data()) + at * pool.page_bytes();
    std::memcpy(to, pool.k(entry), pool.page_bytes());
    std::memset(pool.k(entry), 0xff, pool.page_bytes());
    host_pages_[at] = to;
    left_.push_back(entry);
    entry = kNoPage;
  }
  // Moves some of the pages that are finished, every third one on average.
  void MoveSome(Random& random) {
    for (size_t h = 0; h < sequence_.streams.size(); ++h) {
      for (int32_t page = 0; page < sequence_.kv_len / kPageTokens; ++page) {
        if (sequence_.streams[h].page_table[static_cast<size_t>(page)] != kNoPage && random.Int(0, 2) == 0)
          Move(h, page);
      }
    }
  }

  // All host pages lie in it.
  const Buffer& memory() const { return *memory_; }
  // Pages of the pool that have been left, in order.
  const std::vector<int32_t>& left() const { return left_; }

  HotRows rows() {
    return {num_slots_,      max_pages_,          host_pages_.data(), slot_pages_.data(),
            slot_of_.data(), position_of_.data(), listed_at_.data(),  counts_};
  }
  // Tables of both are equal, and so are the rows of their slots.
  ::testing::AssertionResult Equals(const TestHotBuffer& other) const {
    if (slot_of_ != other.slot_of_) return ::testing::AssertionFailure() << "slot_of";
    if (position_of_ != other.position_of_) return ::testing::AssertionFailure() << "position_of";
    if (listed_at_ != other.listed_at_) return ::testing::AssertionFailure() << "listed_at";
    if (counts_[0] != other.counts_[0] || counts_[1] != other.counts_[1])
      return ::testing::AssertionFailure() << "counts";
    const KvPoolView &own = batch_.pool().view(), &its = other.batch_.pool().view();
    for (size_t i = 0; i < slot_pages_.size(); ++i) {
      if (std::memcmp(own.k(slot_pages_[i]), its.k(other.slot_pages_[i]), own.page_bytes()) != 0)
        return ::testing::AssertionFailure() << "slots of page " << i;
    }
    return ::testing::AssertionSuccess();
  }

  std::vector<const std::byte*> host_pages_;  // [heads, max_pages]
  std::vector<int32_t> slot_pages_;           // [heads, num_slots / 64]
  std::vector<uint16_t> slot_of_;             // [heads, 64 max_pages]
  std::vector<int32_t> position_of_;          // [heads, num_slots]
  std::vector<int32_t> listed_at_;            // [heads, num_slots]
  uint64_t counts_[2] = {};

 private:
  SelectingBatch& batch_;
  TestSequence& sequence_;
  const int32_t num_slots_, max_pages_;
  std::unique_ptr<Buffer> memory_;
  std::vector<int32_t> left_;
};

}  // namespace spl::kernels::testing
