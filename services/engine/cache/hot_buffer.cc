#include "services/engine/cache/hot_buffer.h"

#include <algorithm>
#include <utility>

#include "services/base/check.h"
#include "services/base/status.h"

namespace spl::engine {

using kernels::CopyKind;
using kernels::kPageTokens;

// A move before it is made.
struct HotBuffer::Taken {
  std::vector<int32_t> from;                // pages of the pool, stream by stream
  std::vector<int32_t> host;                // where they go
  std::vector<std::vector<int32_t>> slots;  // [streams]: of the first move
  bool reused = false;                      // the slots are the streams' own first pages
  std::vector<int32_t> new_slots;           // otherwise: all of them, owned
};

HotBuffer::HotBuffer(PagePool& pool, HostKv& host, const KvShape& kv_shape, const Shape& shape,
                     std::span<const kernels::Backend* const> backends)
    : pool_(pool),
      host_(host),
      kv_shape_(kv_shape),
      shape_(shape),
      max_pages_(PagesFor(shape.max_tokens)),
      backends_(backends.begin(), backends.end()),
      heads_of_rank_(kv_shape.num_kv_heads / static_cast<int32_t>(backends.size())),
      moved_(static_cast<size_t>(kv_shape.num_streams())),
      slots_(moved_.size()),
      counted_(backends.size()) {}

absl::StatusOr<std::unique_ptr<HotBuffer>> HotBuffer::Create(PagePool& pool, HostKv& host, const KvShape& kv_shape,
                                                             const Shape& shape,
                                                             std::span<const kernels::Backend* const> backends) {
  SPLICE_CHECK(shape.num_slots > 0 && shape.num_slots % kPageTokens == 0 && shape.num_slots <= kernels::kHotSlotsMax,
               "slots in whole pages");
  auto made = std::unique_ptr<HotBuffer>(new HotBuffer(pool, host, kv_shape, shape, backends));
  const auto streams = static_cast<size_t>(kv_shape.num_layers * made->heads_of_rank_);
  const auto slots = streams * static_cast<size_t>(shape.num_slots), pages = streams * made->max_pages_;
  Places& places = made->places_;
  places.counts = 0;
  places.host_pages = 2 * sizeof(uint64_t);
  places.slot_pages = places.host_pages + pages * sizeof(void*);
  places.position_of = places.slot_pages + slots / kPageTokens * sizeof(int32_t);
  places.listed_at = places.position_of + slots * sizeof(int32_t);
  places.slot_of = places.listed_at + slots * sizeof(int32_t);
  places.end = places.slot_of + pages * kPageTokens * sizeof(uint16_t);
  for (const kernels::Backend* const backend : backends) {
    SPLICE_ASSIGN_OR_RETURN(made->memory_.emplace_back(), backend->Allocate(places.end));
  }
  return made;
}

HotBuffer::~HotBuffer() {
  host_.pages().Release(host_pages_);
  for (const std::vector<int32_t>& pages : slots_) {
    if (!evicted_) pool_.Release(pages);
  }
}

int HotBuffer::rank_of(int32_t stream) const { return stream % kv_shape_.num_kv_heads / heads_of_rank_; }

int64_t HotBuffer::on_rank(int32_t stream) const {
  return int64_t{stream / kv_shape_.num_kv_heads} * heads_of_rank_ + stream % kv_shape_.num_kv_heads % heads_of_rank_;
}

kernels::HotRows HotBuffer::rows(int rank) const {
  return {.num_slots = shape_.num_slots,
          .max_pages = max_pages_,
          .host_pages = reinterpret_cast<const std::byte* const*>(table(rank, places_.host_pages)),
          .slot_pages = reinterpret_cast<const int32_t*>(table(rank, places_.slot_pages)),
          .slot_of = reinterpret_cast<uint16_t*>(table(rank, places_.slot_of)),
          .position_of = reinterpret_cast<int32_t*>(table(rank, places_.position_of)),
          .listed_at = reinterpret_cast<int32_t*>(table(rank, places_.listed_at)),
          .counts = reinterpret_cast<uint64_t*>(table(rank, places_.counts))};
}

absl::Status HotBuffer::TakePages(const SequenceKv& kv, std::span<const int32_t> streams, int32_t end, Taken& taken) {
  const auto of_stream = static_cast<size_t>(slot_pages());
  const bool first = moved(streams[0]) == 0;
  taken.reused = first;
  for (const int32_t stream : streams) {
    SPLICE_CHECK(moved(stream) == moved(streams[0]) && rank_of(stream) < static_cast<int>(backends_.size()),
                 "streams that have moved equally much");
    const std::vector<int32_t>& pages = kv.streams()[static_cast<size_t>(stream)];
    taken.from.insert(taken.from.end(), pages.begin() + moved(stream), pages.begin() + end);
    if (!first) continue;
    const auto leading = std::span(pages).first(of_stream);
    for (const int32_t page : leading) taken.reused = taken.reused && pool_.owners(page) == 1;
    taken.slots.emplace_back(leading.begin(), leading.end());
  }
  SPLICE_RETURN_IF_ERROR(host_.pages().Allocate(static_cast<int64_t>(taken.from.size()), taken.host));
  if (!first || taken.reused) return absl::OkStatus();
  std::vector<int64_t> counts(backends_.size());
  for (const int32_t stream : streams) counts[static_cast<size_t>(rank_of(stream))] += slot_pages();
  if (absl::Status status = pool_.AllocateByRank(counts, taken.new_slots); !status.ok()) {
    host_.pages().Release(taken.host);
    return status;
  }
  // The streams are those of a layer: rank by rank, as pages are given.
  for (size_t i = 0; i < streams.size(); ++i) {
    const auto pages = std::span(taken.new_slots).subspan(i * of_stream, of_stream);
    taken.slots[i].assign(pages.begin(), pages.end());
  }
  return absl::OkStatus();
}

void HotBuffer::PutBack(const Taken& taken) {
  host_.pages().Release(taken.host);
  pool_.Release(taken.new_slots);
}

absl::Status HotBuffer::Move(SequenceKv& kv, std::span<const int32_t> streams, int32_t end) {
  SPLICE_CHECK(!evicted_ && end >= slot_pages() && end <= max_pages_ && int64_t{end} * kPageTokens <= kv.num_tokens(),
               "full pages, at least as many as slots");
  Taken taken;
  SPLICE_RETURN_IF_ERROR(TakePages(kv, streams, end, taken));
  const int32_t begin = moved(streams[0]);
  const auto count = static_cast<size_t>(end - begin);
  std::vector<std::byte*> places;
  for (const int32_t page : taken.host) places.push_back(host_.page(page));
  if (absl::Status read = pool_.ReadPagesTo(taken.from, places); !read.ok()) {
    PutBack(taken);
    return read.code() == absl::StatusCode::kResourceExhausted ? absl::InternalError(read.message()) : read;
  }
  // From here on an error ends the sequence.
  host_pages_.insert(host_pages_.end(), taken.host.begin(), taken.host.end());
  for (size_t i = 0; i < streams.size(); ++i) {
    const int32_t stream = streams[i];
    std::vector<int32_t> left = kv.MoveOut(stream, begin, end);
    if (begin == 0) {
      if (taken.reused) left.erase(left.begin(), left.begin() + static_cast<std::ptrdiff_t>(slot_pages()));
      slots_[static_cast<size_t>(stream)] = std::move(taken.slots[i]);
    }
    pool_.Release(left);
    moved_[static_cast<size_t>(stream)] = end;
  }
  for (size_t i = 0; i < streams.size(); ++i) {
    const int rank = rank_of(streams[i]);
    const auto at = static_cast<size_t>(on_rank(streams[i]) * max_pages_ + begin) * sizeof(void*);
    SPLICE_RETURN_IF_ERROR(backends_[static_cast<size_t>(rank)]->Copy(
        CopyKind::kUpload, table(rank, places_.host_pages + at), &places[i * count], count * sizeof(void*)));
    if (begin == 0) SPLICE_RETURN_IF_ERROR(UploadSlots(streams[i]));
  }
  return absl::OkStatus();
}

absl::Status HotBuffer::UploadSlots(int32_t stream) {
  const int rank = rank_of(stream);
  std::vector<int32_t> pages = slots_[static_cast<size_t>(stream)];
  for (int32_t& page : pages) page -= pool_.view().rank(rank).first_page;
  const auto at = static_cast<size_t>(on_rank(stream) * slot_pages()) * sizeof(int32_t);
  return backends_[static_cast<size_t>(rank)]->Copy(CopyKind::kUpload, table(rank, places_.slot_pages + at),
                                                    pages.data(), pages.size() * sizeof(int32_t));
}

void HotBuffer::Evict() {
  SPLICE_CHECK(!evicted_, "slots that are there");
  for (const std::vector<int32_t>& pages : slots_) pool_.Release(pages);
  evicted_ = true;
}

absl::Status HotBuffer::Refill(const std::unordered_map<int32_t, int32_t>& pages) {
  SPLICE_CHECK(evicted_, "slots that were given back");
  for (std::vector<int32_t>& of_stream : slots_) {
    for (int32_t& page : of_stream) page = pages.at(page);
  }
  evicted_ = false;
  for (int32_t stream = 0; stream < kv_shape_.num_streams(); ++stream) {
    if (!slots_[static_cast<size_t>(stream)].empty()) SPLICE_RETURN_IF_ERROR(UploadSlots(stream));
  }
  return absl::OkStatus();
}

absl::Status HotBuffer::ReadCounts() {
  for (size_t rank = 0; rank < backends_.size(); ++rank) {
    uint64_t now[2] = {};
    SPLICE_RETURN_IF_ERROR(
        backends_[rank]->Copy(CopyKind::kDownload, now, table(static_cast<int>(rank), places_.counts), sizeof(now)));
    host_.Add({now[0] - counted_[rank].listed, now[1] - counted_[rank].copied});
    counted_[rank] = {now[0], now[1]};
  }
  return absl::OkStatus();
}

}  // namespace spl::engine
