#include "services/engine/runtime/chunk_publisher.h"

#include <algorithm>

#include "services/base/check.h"
#include "services/base/status.h"
#include "services/base/thread_priority.h"
#include "services/engine/cache/chunk_io.h"
#include "services/engine/cache/segment_io.h"
#include "services/engine/cache/summary_io.h"
#include "services/engine/recovery/sparsex.h"

namespace spl::engine {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kIdleWait{100};
// Packed for one put: long enough that its two calls do not count, short enough that cancelling does not wait for it.
constexpr size_t kWindowBytes = 16 << 20;
// The same of an offer, in time: the question of a prompt that arrives meanwhile stands behind it on the link.
constexpr double kOfferWindowSeconds = 0.05;

size_t NumChunks(const ChunkRun& run) { return run.keys.size() - std::min(run.first_chunk, run.keys.size()); }

}  // namespace

ChunkPublisher::ChunkPublisher(std::shared_ptr<const Model> model, const ChunkPublisherOptions& options)
    : model_(std::move(model)), options_(options), offers_(options.max_offers), orders_(options.max_orders) {
  threads_.emplace_back([this] { OfferLoop(); });
  for (size_t i = 0; i < options.order_threads; ++i) threads_.emplace_back([this] { OrderLoop(); });
}

bool ChunkPublisher::Offer(ChunkRun run) {
  run.offered = Clock::now();
  const size_t num_chunks = NumChunks(run);
  const size_t before = offered_chunks_.fetch_add(num_chunks);
  const bool fits = offers_.size() < options_.few_offers || before + num_chunks <= options_.max_offered_chunks;
  const bool taken = fits && offers_.TryPush(std::move(run));
  if (!taken) {
    offered_chunks_.fetch_sub(num_chunks);
    crowded_ = true;
  }
  return Count(taken);
}

ChunkPublisher::~ChunkPublisher() { SPLICE_CHECK(threads_.empty(), "Stop() was not called"); }

void ChunkPublisher::Stop() {
  offers_.Close();
  orders_.Close();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

absl::StatusOr<chunk::Chunk> ChunkPublisher::Pack(const ChunkRun& run, size_t index) const {
  const auto at = static_cast<int32_t>(index);
  SPLICE_ASSIGN_OR_RETURN(chunk::Chunk chunk, run.source != nullptr
                                                  ? PackSegmentChunk(*run.source, at, run.keys[index], *model_)
                                                  : PackChunk(*run.kv, at, run.keys[index], *model_));
  chunk.header.namespace_id = run.namespace_key;
  if (options_.recompute_seconds)
    chunk.header.recompute_seconds = static_cast<float>(
        options_.recompute_seconds(chunk.header.first_position, static_cast<int32_t>(chunk.header.num_tokens)));
  return chunk;
}

size_t ChunkPublisher::WindowEnd(const ChunkRun& run, size_t begin, size_t most_bytes) const {
  const size_t window = std::max<size_t>(1, most_bytes / ChunkPayloadBytes(*model_));
  return std::min(run.keys.size(), begin + window);
}

absl::Status ChunkPublisher::PutWindow(const ChunkRun& run, size_t begin, size_t end, const chunk::PutOptions& put,
                                       Deadline deadline, PublishTally& tally) {
  std::vector<chunk::Chunk> chunks;
  uint64_t num_bytes = 0;
  for (size_t i = begin; i < end; ++i) {
    SPLICE_ASSIGN_OR_RETURN(chunk::Chunk chunk, Pack(run, i));
    num_bytes += chunk.payload.size();
    chunks.push_back(std::move(chunk));
  }
  SPLICE_ASSIGN_OR_RETURN(const chunk::PutReport report, PutAll(chunks, put, deadline, "chunks"));
  tally.num_chunks += chunks.size();
  tally.num_existing += report.num_existing;
  tally.num_bytes += num_bytes;
  return run.quantized && run.source != nullptr ? PutQuantized(run, chunks, put, deadline) : absl::OkStatus();
}

absl::StatusOr<chunk::PutReport> ChunkPublisher::PutAll(std::span<const chunk::Chunk> chunks,
                                                        const chunk::PutOptions& put, Deadline deadline,
                                                        std::string_view what) {
  SPLICE_ASSIGN_OR_RETURN(const chunk::PutReport report,
                          options_.store->PutWith(chunk::PointersTo(chunks), put, deadline));
  if (report.num_stored + report.num_existing != chunks.size() || (put.durable && report.num_durable != chunks.size()))
    return Errorf(absl::StatusCode::kUnavailable,
                  "the chunk store acknowledged {} new and {} known {}, {} of them on disk, of {}: put them again",
                  report.num_stored, report.num_existing, what, report.num_durable, chunks.size());
  return report;
}

absl::Status ChunkPublisher::PutQuantized(const ChunkRun& run, std::span<const chunk::Chunk> chunks,
                                          const chunk::PutOptions& put, Deadline deadline) {
  const int32_t first_layer = SparseXPolicy::DefaultDenseLayers(model_->config(), run.source->began_prompt());
  std::vector<chunk::Chunk> quantized;
  for (const chunk::Chunk& chunk : chunks) quantized.push_back(QuantizeChunk(chunk, first_layer, *model_));
  return PutAll(quantized, put, deadline, "quantized copies").status();
}

absl::Status ChunkPublisher::PutSummary(const ChunkRun& run, const chunk::PutOptions& put, Deadline deadline) {
  if (run.source == nullptr) return absl::OkStatus();
  std::shared_ptr<const SegmentSummary> summary = run.source->summary();
  if (summary == nullptr || summary->local_query.empty()) return absl::OkStatus();
  const auto num_tokens = static_cast<int32_t>(run.source->tokens().size());
  if (summary->tile_means.empty()) {
    SPLICE_ASSIGN_OR_RETURN(SegmentSummary keys, SummarizeKeys({run.source, 0, run.source->begin(), num_tokens},
                                                               model_->config(), model_->kv_dtype()));
    summary = run.source->KeepSummary(std::move(keys));
  }
  chunk::Chunk chunk =
      PackSummary(*run.source, *summary, SummaryKeyOf(run.keys, model_->kv_fingerprint(), run.namespace_key), *model_);
  chunk.header.namespace_id = run.namespace_key;
  // Without it the last two tiles run over the whole segment.
  if (options_.recompute_seconds)
    chunk.header.recompute_seconds = static_cast<float>(
        options_.recompute_seconds(run.source->begin(), static_cast<int32_t>(chunk.header.num_tokens)));
  return PutAll({&chunk, 1}, put, deadline, "summaries").status();
}

void ChunkPublisher::Released() {
  num_held_.fetch_sub(1);
  if (options_.on_released) options_.on_released();
}

void ChunkPublisher::OfferLoop() {
  SetThreadPriority(ThreadPriority::kBackground);
  while (true) {
    std::optional<ChunkRun> run = offers_.Pop(kIdleWait);
    if (offers_.closed()) return;
    if (!run) continue;
    PutOffer(*run);
    offered_chunks_.fetch_sub(NumChunks(*run));
    crowded_ = false;
    run.reset();  // gives the pages back
    Released();
  }
}

// Packing reads all of the pages, and sending takes the link that other prompts fetch over: both wait.
void ChunkPublisher::AwaitTurn(const ChunkRun& run) const {
  if (!options_.wait_for_idle) return;
  const Deadline end = run.offered + options_.max_delay;
  for (auto now = Clock::now(); now < end && !crowded_ && !offers_.closed(); now = Clock::now()) {
    if (options_.wait_for_idle(std::min(end, now + kIdleWait))) return;
  }
}

void ChunkPublisher::PutOffer(ChunkRun& run) {
  AwaitTurn(run);
  size_t begin = run.first_chunk;
  if (run.kv != nullptr && begin < run.keys.size()) {
    // A prompt that was computed though the store has some of it: those chunks are not packed again.
    begin += options_.store->CountLeading(std::span(run.keys).subspan(begin), Clock::now() + options_.offer_timeout)
                 .value_or(0);
  }
  PublishTally tally;
  absl::Status put;
  while (begin < run.keys.size() && !offers_.closed() && put.ok()) {
    AwaitTurn(run);
    const size_t end = WindowEnd(run, begin, offer_window_bytes_);
    const Deadline start = Clock::now();
    const uint64_t bytes_before = tally.num_bytes;
    put = PutWindow(run, begin, end, {}, start + options_.offer_timeout, tally);
    const double seconds = std::max(1e-6, std::chrono::duration<double>(Clock::now() - start).count());
    const double window = static_cast<double>(tally.num_bytes - bytes_before) / seconds * kOfferWindowSeconds;
    offer_window_bytes_ = static_cast<size_t>(std::min(window, static_cast<double>(kWindowBytes)));
    begin = end;
  }
  if (put.ok() && !offers_.closed()) (void)PutSummary(run, {}, Clock::now() + options_.offer_timeout);
}

absl::Status ChunkPublisher::Fulfil(const PublishOrder& order, PublishTally& tally) {
  // One put, with its own time.
  const auto step = [&](const auto& put) -> absl::Status {
    if (orders_.closed()) return absl::UnavailableError("the prefill worker is stopping");
    if (order.cancelled->load(std::memory_order_relaxed)) return absl::CancelledError("the publishing was cancelled");
    const auto now = Clock::now();
    if (now >= order.deadline)
      return Errorf(absl::StatusCode::kDeadlineExceeded, "the deadline passed after {} chunks were stored",
                    tally.num_chunks);
    const absl::Status status = put(std::min(order.deadline, now + options_.order_timeout));
    // Its own time was over, not the caller's.
    if (status.code() == absl::StatusCode::kDeadlineExceeded && Clock::now() < order.deadline)
      return Errorf(absl::StatusCode::kUnavailable, "the chunk store did not answer within {} ms: {}",
                    options_.order_timeout.count(), MessageOf(status));
    return status;
  };
  for (const ChunkRun& run : order.runs) {
    for (size_t begin = run.first_chunk; begin < run.keys.size();) {
      const size_t end = WindowEnd(run, begin, kWindowBytes);
      SPLICE_RETURN_IF_ERROR(
          step([&](Deadline deadline) { return PutWindow(run, begin, end, order.put, deadline, tally); }));
      begin = end;
    }
    SPLICE_RETURN_IF_ERROR(step([&](Deadline deadline) { return PutSummary(run, order.put, deadline); }));
  }
  return absl::OkStatus();
}

void ChunkPublisher::OrderLoop() {
  while (true) {
    std::optional<PublishOrder> order = orders_.Pop(kIdleWait);
    if (!order) {
      if (orders_.closed()) return;
      continue;
    }
    PublishTally tally;
    const absl::Status status = Fulfil(*order, tally);
    order->runs.clear();  // gives the pages back
    Released();
    order->on_done(status, tally);
  }
}

}  // namespace spl::engine
