#include "services/engine/runtime/incoming_prefix.h"

#include <algorithm>

#include "services/base/check.h"
#include "services/engine/cache/chunk_io.h"

namespace spl::engine {
namespace {

constexpr int32_t kPage = kernels::kPageTokens;

}  // namespace

void IncomingPrefix::Expect(int32_t num_chunks, Order order) {
  std::lock_guard lock(mutex_);
  SPLICE_CHECK(end_ == first_, "chunks are expected once");
  end_ = first_ + num_chunks;
  order_ = order;
  landed_begin_ = landed_end_ = order == Order::kForwards ? first_ : end_;
}

int32_t IncomingPrefix::ChunkAt(size_t index) const {
  const auto i = static_cast<int32_t>(index);
  return order_ == Order::kForwards ? first_ + i : end_ - 1 - i;
}

std::vector<chunk::ChunkKey> IncomingPrefix::InOrder(std::span<const chunk::ChunkKey> keys) const {
  std::lock_guard lock(mutex_);
  std::vector<chunk::ChunkKey> ordered(keys.begin(), keys.end());
  if (order_ == Order::kBackwards) std::reverse(ordered.begin(), ordered.end());
  return ordered;
}

chunk::Pieces IncomingPrefix::PlaceFor(size_t index, const chunk::ChunkHeader& header) {
  std::lock_guard lock(mutex_);
  const int32_t chunk = ChunkAt(index);
  if (!WantsLocked(chunk) || !IsOfModel(header, model_) || header.provenance != chunk::Provenance::kExact ||
      header.num_tokens != kPage || header.first_position != static_cast<uint32_t>(chunk * kPage))
    return {};
  std::vector<std::byte>& staged = staged_[index];
  if (staged.empty() && !spare_.empty()) {
    staged = std::move(spare_.back());
    spare_.pop_back();
  }
  staged.resize(header.payload_bytes);
  return {staged};
}

bool IncomingPrefix::Land(size_t index, const chunk::ChunkHeader& header) {
  std::lock_guard lock(mutex_);
  const auto staged = staged_.find(index);
  SPLICE_CHECK(staged != staged_.end(), "a chunk lands where it was placed");
  const int32_t chunk = ChunkAt(index);
  const bool lands = WantsLocked(chunk) && kv_->pool().WritePages(kv_->PagesOfChunk(chunk), staged->second.data()).ok();
  spare_.push_back(std::move(staged->second));
  staged_.erase(staged);
  if (!lands) return false;
  (order_ == Order::kForwards ? landed_end_ : landed_begin_) = order_ == Order::kForwards ? chunk + 1 : chunk;
  num_bytes_ += static_cast<int64_t>(header.payload_bytes);
  return true;
}

int64_t IncomingPrefix::Take(int64_t from, int64_t rows) {
  SPLICE_CHECK(rows > 0, "a prompt without rows has not met what lands");
  std::lock_guard lock(mutex_);
  int64_t end = from + rows;
  if (landed_begin_ < landed_end_ && from <= int64_t{landed_begin_} * kPage)
    end = std::min(end, int64_t{landed_begin_} * kPage);
  front_ = std::max(front_, PagesFor(end));
  return end;
}

// Forwards, chunks may land behind those that are taken, which then are landed ones.
PositionRange IncomingPrefix::Landed() const {
  std::lock_guard lock(mutex_);
  if (order_ == Order::kForwards) return {};
  return {landed_begin_ * kPage, landed_end_ * kPage};
}

PositionRange IncomingPrefix::Close() {
  std::lock_guard lock(mutex_);
  kv_.reset();
  return {landed_begin_ * kPage, landed_end_ * kPage};
}

int64_t IncomingPrefix::num_bytes() const {
  std::lock_guard lock(mutex_);
  return num_bytes_;
}

int32_t IncomingPrefix::num_expected() const {
  std::lock_guard lock(mutex_);
  return end_ - first_;
}

}  // namespace spl::engine
