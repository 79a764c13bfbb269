#include "services/engine/runtime/measure_step_costs.h"

#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "services/base/status.h"
#include "services/engine/cache/compact_pages.h"
#include "services/engine/cache/kv_memory.h"
#include "services/engine/methods/selection_methods.h"
#include "services/engine/runtime/local_generator.h"
#include "services/engine/selection/adaptive.h"
#include "services/engine/selection/dense.h"

namespace spl::engine {
namespace {

using Clock = std::chrono::steady_clock;

// 0: the shortest from which a sequence may choose.
constexpr int64_t kLengths[] = {0, 8'192, 16'384, 32'768, 65'536, 131'072};
constexpr size_t kNoisePages = 64;
// Steps of one kind at one point: the first builds what it needs, and the second is recorded.
constexpr int kWarmSteps = 2, kTimedSteps = 2;
constexpr int64_t kRoom = 2 * (kWarmSteps + kTimedSteps);  // positions that a point's steps write

class Measurement {
 public:
  Measurement(ParallelExecutor& executor, PagePool& pool, Clock::time_point end)
      : model_(executor.model()),
        executor_(executor),
        pool_(pool),
        end_(end),
        options_(WithKeys("adaptive", model_)),
        dense_(model_.config()),
        noise_(NoisePages(model_, kNoisePages)),
        filled_(static_cast<size_t>(pool.num_pages())) {}

  absl::StatusOr<StepCosts> Run() {
    SPLICE_ASSIGN_OR_RETURN(const auto selector, MakeTokenSelector(options_, model_.config(), nullptr));
    if (selector->adaptive() == nullptr) return StepCosts();
    std::vector<StepCosts::Row> rows;
    for (int64_t length : kLengths) {
      if (length == 0) length = 2 * int64_t{selector->scoring().budget} + 1;
      if (length + kRoom <= model_.config().max_positions) rows.push_back({length, {}});
    }
    // Small batches of every length first.
    const size_t rows_max = static_cast<size_t>(executor_.max_rows());
    bool fits = true;
    for (size_t n = 1; fits; n *= 2) {
      fits = false;
      for (StepCosts::Row& row : rows) {
        if (Clock::now() >= end_) break;
        SPLICE_ASSIGN_OR_RETURN(const bool all, MeasureUpTo(std::min(n, rows_max), row));
        fits |= all && n < rows_max;
      }
    }
    std::erase_if(rows, [](const StepCosts::Row& row) { return row.points.empty(); });
    return StepCosts(std::move(rows));
  }

 private:
  struct Sequence {
    std::unique_ptr<SequenceKv> kv;
    std::unique_ptr<CompactPages> compact;
    std::unique_ptr<TokenSelector> selector;
  };

  // A point of `num` sequences, or of as many as there is room for, unless the row has it. False: there was no room.
  absl::StatusOr<bool> MeasureUpTo(size_t num, StepCosts::Row& row) {
    std::vector<Sequence> sequences;
    absl::Status room;
    while (room.ok() && sequences.size() < num) {
      room = Add(row.length, sequences);
      if (!room.ok() && room.code() != absl::StatusCode::kResourceExhausted) return room;
    }
    const auto measured = static_cast<size_t>(row.points.empty() ? 0 : row.points.back().sequences);
    if (sequences.size() <= measured) return false;
    SPLICE_ASSIGN_OR_RETURN(row.points.emplace_back(), MeasurePoint(row.length, sequences));
    return room.ok();
  }

  absl::Status Add(int64_t length, std::vector<Sequence>& sequences) {
    Sequence sequence;
    SPLICE_ASSIGN_OR_RETURN(sequence.selector, MakeTokenSelector(options_, model_.config(), nullptr));
    sequence.kv = std::make_unique<SequenceKv>(pool_, KvShapeOf(model_.config()));
    SPLICE_RETURN_IF_ERROR(sequence.kv->Reserve(length + kRoom));
    SPLICE_ASSIGN_OR_RETURN(sequence.compact, MakeCompactPages(*sequence.selector, model_, pool_, length + kRoom));
    SPLICE_RETURN_IF_ERROR(sequence.compact->Reserve(length + kRoom));
    for (const std::vector<int32_t>& table : sequence.compact->tables()) {
      for (const int32_t page : table) filled_[page] = false;  // with something else than keys and values
    }
    SPLICE_RETURN_IF_ERROR(Fill(*sequence.kv));
    sequences.push_back(std::move(sequence));
    return absl::OkStatus();
  }

  // Pages that lengths share are filled once, those that lie together in one call.
  absl::Status Fill(const SequenceKv& kv) {
    std::vector<int32_t> pages = kv.AllPages();
    std::erase_if(pages, [&](int32_t page) { return filled_[page]; });
    std::sort(pages.begin(), pages.end());
    for (size_t begin = 0, end = 0; begin < pages.size(); begin = end) {
      const int rank = pool_.view().rank_of(pages[begin]);
      for (end = begin; end < pages.size() && pages[end] == pages[begin] + static_cast<int32_t>(end - begin) &&
                        pool_.view().rank_of(pages[end]) == rank;
           ++end)
        filled_[pages[end]] = true;
      SPLICE_RETURN_IF_ERROR(
          FillRun(*model_.backends()[rank], pool_.view().k(pages[begin]), (end - begin) * pool_.view().page_bytes()));
    }
    return absl::OkStatus();
  }

  // Some random pages, then copies of them, each twice as long as the one before.
  absl::Status FillRun(const kernels::Backend& backend, std::byte* to, size_t bytes) const {
    size_t done = std::min(noise_.size(), bytes);
    SPLICE_RETURN_IF_ERROR(backend.Copy(kernels::CopyKind::kUpload, to, noise_.data(), done));
    while (done < bytes) {
      const size_t more = std::min(done, bytes - done);
      const kernels::CopyOp op{to + done, to, more};
      SPLICE_RETURN_IF_ERROR(backend.Copy(kernels::CopyKind::kWithin, {&op, 1}));
      done += more;
    }
    return absl::OkStatus();
  }

  absl::StatusOr<StepCosts::Point> MeasurePoint(int64_t length, std::vector<Sequence>& sequences) {
    StepCosts::Point point{.sequences = static_cast<int64_t>(sequences.size())};
    SPLICE_RETURN_IF_ERROR(Restart(length, sequences));
    for (const bool chooses : {false, true}) {
      std::array<double, kTimedSteps> timed;
      for (int step = 0; step < kWarmSteps + kTimedSteps; ++step) {
        SPLICE_ASSIGN_OR_RETURN(const double seconds, TimeStep(sequences, chooses));
        if (step >= kWarmSteps) timed[step - kWarmSteps] = seconds;
      }
      std::sort(timed.begin(), timed.end());
      // Others on the machine make a step slower, never faster: what they do must not make dense steps seem slow.
      (chooses ? point.chosen_s : point.dense_s) = chooses ? timed.back() : timed.front();
    }
    // Sequences that begin to choose pack their keys in a step of a kind that was recorded long ago.
    SPLICE_RETURN_IF_ERROR(Restart(length, sequences));
    SPLICE_ASSIGN_OR_RETURN(const double first_s, TimeStep(sequences, true));
    point.change_s = std::max(0.0, first_s - point.chosen_s);
    return point;
  }

  // As sequences of that length that have chosen nothing yet.
  absl::Status Restart(int64_t length, std::vector<Sequence>& sequences) const {
    for (Sequence& sequence : sequences) {
      sequence.kv->set_num_tokens(length);
      SPLICE_ASSIGN_OR_RETURN(sequence.selector, MakeTokenSelector(options_, model_.config(), nullptr));
    }
    return absl::OkStatus();
  }

  // From its start to its tokens.
  absl::StatusOr<double> TimeStep(std::vector<Sequence>& sequences, bool chooses) {
    std::vector<DecodeRow> rows;
    for (Sequence& sequence : sequences) {
      const int64_t kv_len = sequence.kv->num_tokens() + 1;
      if (chooses) sequence.selector->adaptive()->Decide(true, kv_len);
      rows.push_back({.kv = sequence.kv.get(),
                      .selector = chooses ? sequence.selector.get() : &dense_,
                      .compact = chooses ? sequence.compact.get() : nullptr});
    }
    const auto start = Clock::now();
    SPLICE_RETURN_IF_ERROR(executor_.Decode(rows));
    SPLICE_RETURN_IF_ERROR(executor_.Argmax().status());
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    for (Sequence& sequence : sequences) sequence.kv->set_num_tokens(sequence.kv->num_tokens() + 1);
    return seconds;
  }

  const Model& model_;
  ParallelExecutor& executor_;
  PagePool& pool_;
  const Clock::time_point end_;
  const DecodeOptions options_;
  DenseSelector dense_;
  const std::vector<std::byte> noise_;
  std::vector<bool> filled_;  // [num_pages]
};

}  // namespace

absl::StatusOr<StepCosts> MeasureStepCosts(ParallelExecutor& executor, PagePool& pool,
                                           std::chrono::milliseconds at_most) {
  return Measurement(executor, pool, Clock::now() + at_most).Run();
}

}  // namespace spl::engine
