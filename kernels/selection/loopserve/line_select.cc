#include "kernels/selection/loopserve/line_select.h"

#include <algorithm>
#include <cmath>

#include "kernels/common/status.h"

namespace spl::kernels {
namespace {

// The lines of one kind that still have weight, heaviest first.
struct List {
  std::vector<int32_t> line;
  std::vector<float> weight, largest;
  bool more = false;  // than were taken into the list

  size_t size() const { return line.size(); }
};

List Sorted(const std::vector<float>& weight, const std::vector<float>& largest, size_t most) {
  List list;
  for (size_t i = 0; i < weight.size(); ++i) {
    if (weight[i] > 0) list.line.push_back(static_cast<int32_t>(i));
  }
  std::stable_sort(list.line.begin(), list.line.end(), [&](int32_t a, int32_t b) {
    return weight[static_cast<size_t>(a)] > weight[static_cast<size_t>(b)];
  });
  list.more = list.line.size() > most;
  if (list.more) list.line.resize(most);
  for (const int32_t i : list.line) {
    list.weight.push_back(weight[static_cast<size_t>(i)]);
    list.largest.push_back(largest[static_cast<size_t>(i)]);
  }
  return list;
}

enum class RoundEnd { kCovered, kStuck, kFull };

class Selection {
 public:
  Selection(const LineOptions& options, const LineRows& rows, const LineSample& sample)
      : options_(options), rows_(rows), sample_(sample) {}

  LineChoice Run() {
    choice_.total = SumLines(sample_).total;
    for (int32_t j = 0; j < std::min(options_.forced_columns, rows_.num_keys()); ++j) TakeColumn(j);
    for (int32_t o = 0; o < std::min(options_.forced_offsets, rows_.num_keys()); ++o) TakeOffset(o);
    if (options_.top_columns > 0) {
      TakeHeaviest();
    } else {
      choice_.dense = !Cover();
    }
    if (choice_.dense) {
      choice_.columns.clear();
      choice_.offsets.clear();
    }
    std::sort(choice_.columns.begin(), choice_.columns.end());
    std::sort(choice_.offsets.begin(), choice_.offsets.end());
    return std::move(choice_);
  }

 private:
  void TakeColumn(int32_t j) {
    choice_.columns.push_back(j);
    for (size_t r = 0; r < sample_.positions.size(); ++r) {
      if (j <= sample_.positions[r]) sample_.weights[static_cast<int64_t>(r) * sample_.stride + j] = 0;
    }
  }
  void TakeOffset(int32_t o) {
    choice_.offsets.push_back(o);
    for (size_t r = 0; r < sample_.positions.size(); ++r) {
      const int32_t j = sample_.positions[r] - o;
      if (j >= 0) sample_.weights[static_cast<int64_t>(r) * sample_.stride + j] = 0;
    }
  }
  size_t Room(int32_t most, const std::vector<int32_t>& taken) const {
    return static_cast<size_t>(std::max<int64_t>(0, int64_t{most} - static_cast<int64_t>(taken.size())));
  }

  void TakeHeaviest() {
    const LineSums sums = SumLines(sample_);
    const List columns = Sorted(sums.column, sums.column_max, Room(options_.top_columns, choice_.columns));
    const List offsets = Sorted(sums.offset, sums.offset_max, Room(options_.top_offsets, choice_.offsets));
    for (const int32_t j : columns.line) TakeColumn(j);
    for (const int32_t o : offsets.line) TakeOffset(o);
    choice_.rounds = 1;
    choice_.uncovered = SumLines(sample_).total;
  }

  // False: dense.
  bool Cover() {
    const auto target = static_cast<float>((1.0 - options_.alpha) * choice_.total);
    for (;; ++choice_.rounds) {
      const LineSums sums = SumLines(sample_);
      choice_.uncovered = sums.total;
      if (static_cast<float>(sums.total) <= target) return true;
      if (choice_.rounds == options_.max_rounds) return false;
      switch (Round(sums, target)) {
        case RoundEnd::kCovered:
          ++choice_.rounds;
          return true;
        case RoundEnd::kStuck:
          break;
        case RoundEnd::kFull:
          ++choice_.rounds;
          return false;
      }
    }
  }

  // The arithmetic is f32 and in this order on every device.
  RoundEnd Round(const LineSums& sums, float target) {
    const bool last_round = choice_.rounds + 1 == options_.max_rounds;
    const size_t room_v = Room(options_.max_columns, choice_.columns);
    const size_t room_s = Room(options_.max_offsets, choice_.offsets);
    const List columns = Sorted(sums.column, sums.column_max, std::min<size_t>(room_v, kLinesPerRound));
    const List offsets = Sorted(sums.offset, sums.offset_max, std::min<size_t>(room_s, kLinesPerRound));
    const auto n = rows_.num_keys(), rows = rows_.num_rows;
    auto num_columns = static_cast<int32_t>(choice_.columns.size());
    auto num_offsets = static_cast<int32_t>(choice_.offsets.size());
    size_t v = 0, s = 0;
    float overlap_v = 0, overlap_s = 0;  // ol_v, ol_s
    auto uncovered = static_cast<float>(sums.total);
    RoundEnd end = RoundEnd::kStuck;
    while (uncovered > target) {
      const bool last_v = v == columns.size() && columns.more, last_s = s == offsets.size() && offsets.more;
      if (last_v || last_s) {
        if ((last_v && v == room_v) || (last_s && s == room_s)) end = RoundEnd::kFull;
        break;
      }
      const float gain_s = s < offsets.size() ? std::max(0.0f, offsets.weight[s] - overlap_v) : 0.0f;
      const float gain_v = v < columns.size() ? std::max(0.0f, columns.weight[v] - overlap_s) : 0.0f;
      if (gain_s == 0 && gain_v == 0) break;
      const auto cells_s =
          static_cast<float>(std::max(1, s < offsets.size() ? std::min(rows, n - offsets.line[s]) - num_columns : 1));
      const auto cells_v = static_cast<float>(std::max(
          1, v < columns.size() ? rows - std::max(0, columns.line[v] - rows_.first_position) - num_offsets : 1));
      const bool slash = gain_s * cells_v >= gain_v * cells_s;
      // The gain of the other line if nothing of it were counted twice.
      const float worth = slash ? (v < columns.size() ? columns.weight[v] : 0) * cells_s
                                : (s < offsets.size() ? offsets.weight[s] : 0) * cells_v;
      if (!last_round && 2 * (slash ? gain_s * cells_v : gain_v * cells_s) < worth) break;
      if (slash) {
        uncovered -= gain_s;
        overlap_s += offsets.largest[s++];
        ++num_offsets;
      } else {
        uncovered -= gain_v;
        overlap_v += columns.largest[v++];
        ++num_columns;
      }
    }
    if (uncovered <= target) end = RoundEnd::kCovered;
    for (size_t i = 0; i < v; ++i) TakeColumn(columns.line[i]);
    for (size_t i = 0; i < s; ++i) TakeOffset(offsets.line[i]);
    choice_.uncovered = std::max(0.0f, uncovered);
    return end;
  }

  const LineOptions& options_;
  const LineRows rows_;
  const LineSample& sample_;
  LineChoice choice_;
};

}  // namespace

absl::Status ValidateLineOptions(const LineOptions& o) {
  if (!(o.alpha > 0 && o.alpha <= 1)) return InvalidCall("lines: alpha ", o.alpha, " is outside (0, 1]");
  if (o.max_columns < 1 || o.max_columns > kMaxLines)
    return InvalidCall("lines: max_columns ", o.max_columns, ", 1 to ", kMaxLines, " are possible");
  if (o.max_offsets < 1 || o.max_offsets > kMaxLines)
    return InvalidCall("lines: max_offsets ", o.max_offsets, ", 1 to ", kMaxLines, " are possible");
  if (o.forced_columns < 0 || o.forced_columns > o.max_columns)
    return InvalidCall("lines: forced_columns ", o.forced_columns, ", 0 to max_columns ", o.max_columns);
  if (o.forced_offsets < 1 || o.forced_offsets > o.max_offsets)
    return InvalidCall("lines: forced_offsets ", o.forced_offsets, ", 1 to max_offsets ", o.max_offsets);
  if (o.max_rounds < 1 || o.max_rounds > 16) return InvalidCall("lines: max_rounds ", o.max_rounds, ", 1 to 16");
  if ((o.top_columns > 0) != (o.top_offsets > 0) || o.top_columns < 0 || o.top_offsets < 0)
    return InvalidCall("lines: top_columns ", o.top_columns, " and top_offsets ", o.top_offsets,
                       ": both positive, or both 0 for alpha");
  if (o.top_columns > o.max_columns || o.top_offsets > o.max_offsets)
    return InvalidCall("lines: top_columns ", o.top_columns, " of at most ", o.max_columns, ", top_offsets ",
                       o.top_offsets, " of at most ", o.max_offsets);
  return absl::OkStatus();
}

LineChoice SelectLines(const LineOptions& options, const LineRows& rows, const LineSample& sample) {
  return Selection(options, rows, sample).Run();
}

}  // namespace spl::kernels
