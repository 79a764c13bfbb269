// A chunk store in memory that blocks, fails, forgets and takes its time as a test asks for, and counts its calls.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "services/chunk/chunk.h"

namespace spl::engine {

using namespace std::chrono_literals;

// Keeps chunks in a map and does with puts what a test asks for.
class FakeStore final : public chunk::ChunkStore {
 public:
  absl::StatusOr<size_t> CountLeading(std::span<const chunk::ChunkKey> keys, SteadyTime) override {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, 60s, [&] { return !counts_blocked_; });
    size_t n = 0;
    while (n < keys.size() && chunks_.contains(keys[n])) ++n;
    ++num_counts_;
    changed_.notify_all();
    return n;
  }
  absl::StatusOr<size_t> GetLeading(std::span<const chunk::ChunkKey> keys, SteadyTime,
                                    const std::function<bool(chunk::Chunk&&)>& sink) override {
    size_t n = 0;
    for (const chunk::ChunkKey& key : keys) {
      chunk::Chunk copy;
      {
        std::unique_lock lock(mutex_);
        num_waiting_gets_ += blocked_get_ == key;
        changed_.notify_all();
        changed_.wait_for(lock, 60s, [&] { return blocked_get_ != key; });
        changed_.wait_for(lock, pace_, [&] { return pace_ == 0ns; });
        if (fail) return absl::UnavailableError("the store is gone");
        ++num_gets_;
        changed_.notify_all();
        const auto it = chunks_.find(key);
        if (it == chunks_.end()) break;
        copy = it->second;
      }
      if (!sink(std::move(copy))) break;
      ++n;
    }
    return n;
  }
  absl::Status Put(std::span<const chunk::Chunk> chunks, SteadyTime deadline) override {
    return PutWith(chunk::PointersTo(chunks), {}, deadline).status();
  }
  absl::StatusOr<chunk::PutReport> PutWith(std::span<const chunk::Chunk* const> chunks,
                                           const chunk::PutOptions& options, SteadyTime deadline) override {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_until(lock, std::min(deadline, std::chrono::steady_clock::now() + 60s),
                             [&] { return !puts_blocked_; }))
      return absl::DeadlineExceededError("a blocked store");
    if (fail) return absl::UnavailableError("the store is gone");
    if (!put_status_.ok()) return put_status_;
    put_options_.push_back(options);
    put_bytes_.push_back(0);
    chunk::PutReport report;
    for (const chunk::Chunk* const chunk : chunks) {
      put_bytes_.back() += chunk->payload.size();
      changed_.wait_for(lock, put_pace_, [&] { return put_pace_ == 0ns; });
      if (forgetful_) continue;
      ++(chunks_.try_emplace(chunk->header.key, *chunk).second ? report.num_stored : report.num_existing);
      report.num_durable += options.durable;
    }
    changed_.notify_all();
    return report;
  }

  void BlockCounts(bool blocked) { Set(counts_blocked_, blocked); }
  void BlockPuts(bool blocked) { Set(puts_blocked_, blocked); }
  // Gets of this chunk wait until it is another's turn, or nobody's.
  void BlockGetsOf(const std::optional<chunk::ChunkKey>& key) { Set(blocked_get_, key); }
  bool WaitForBlockedGet() {
    return WaitUntil([&] { return num_waiting_gets_ > 0; });
  }
  // Every chunk takes so long to put.
  void SetPutPace(std::chrono::nanoseconds pace) { Set(put_pace_, pace); }
  // Payload bytes of each put.
  std::vector<size_t> put_bytes() const {
    std::lock_guard lock(mutex_);
    return put_bytes_;
  }
  // Every chunk takes so long to read.
  void SetPace(std::chrono::nanoseconds pace) { Set(pace_, pace); }
  // Chunks that were read, and calls of CountLeading, from the start on.
  size_t num_gets() const {
    std::lock_guard lock(mutex_);
    return num_gets_;
  }
  bool WaitForGets(size_t n) {
    return WaitUntil([&] { return num_gets_ >= n; });
  }
  size_t num_counts() const {
    std::lock_guard lock(mutex_);
    return num_counts_;
  }
  bool WaitForCounts(size_t n) {
    return WaitUntil([&] { return num_counts_ >= n; });
  }
  // Every put is answered with this.
  void RefusePuts(const absl::Status& status) {
    std::lock_guard lock(mutex_);
    put_status_ = status;
  }
  // Puts are answered with OK and store nothing.
  void Forget(bool forgetful) {
    std::lock_guard lock(mutex_);
    forgetful_ = forgetful;
  }
  std::vector<chunk::PutOptions> put_options() const {
    std::lock_guard lock(mutex_);
    return put_options_;
  }
  std::optional<chunk::Chunk> Find(const chunk::ChunkKey& key) const {
    std::lock_guard lock(mutex_);
    const auto it = chunks_.find(key);
    return it == chunks_.end() ? std::nullopt : std::optional(it->second);
  }
  void Remove(const chunk::ChunkKey& key) {
    std::lock_guard lock(mutex_);
    chunks_.erase(key);
  }
  size_t size() const {
    std::lock_guard lock(mutex_);
    return chunks_.size();
  }
  bool WaitForSize(size_t n, std::chrono::milliseconds limit = 20s) {
    return WaitUntil([&] { return chunks_.size() >= n; }, limit);
  }

  std::atomic<bool> fail{false};

 private:
  template <typename T>
  void Set(T& member, const T& value) {
    std::lock_guard lock(mutex_);
    member = value;
    changed_.notify_all();
  }
  bool WaitUntil(const std::function<bool()>& holds, std::chrono::milliseconds limit = 20s) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, holds);
  }

  mutable std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  bool puts_blocked_ = false, counts_blocked_ = false, forgetful_ = false;
  std::optional<chunk::ChunkKey> blocked_get_;
  int num_waiting_gets_ = 0;
  size_t num_gets_ = 0, num_counts_ = 0;
  std::chrono::nanoseconds pace_{0};
  absl::Status put_status_;
  std::vector<chunk::PutOptions> put_options_;
  std::vector<size_t> put_bytes_;  // of each put
  std::chrono::nanoseconds put_pace_{0};
  std::unordered_map<chunk::ChunkKey, chunk::Chunk, chunk::ChunkKeyHash> chunks_;
};

}  // namespace spl::engine
