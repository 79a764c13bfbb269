// What an evaluation saw: cells of (task, length, method, provenance), as a table, JSON and one HTML page.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tools/cli/eval_method.h"
#include "tools/cli/text_generator.h"

namespace spl::cli {

// By what the answers of a cell are broken down.
enum class EvalGrouping {
  kPosition,  // where the question stands in its turn's new text
  kTurn,
};
absl::StatusOr<EvalGrouping> ParseEvalGrouping(const std::string& name);  // "position", "turn"
const char* EvalGroupingName(EvalGrouping grouping);

// One place where a sample wants an answer.
struct EvalPlace {
  std::string id, task;
  int64_t length = 0;               // nominal, of the sample
  int64_t turn = 1, num_turns = 1;  // from 1
  std::string position;             // "begin", "middle", "end"; empty: unknown
  int64_t history_tokens = 0;       // of the prompt, up to the end of the last answer
};

struct EvalKey {
  std::string task;
  int64_t length = 0;
  std::string reuse, decode;  // labels, as the user wrote them
  std::string provenance;     // "-": reuses nothing
  auto operator<=>(const EvalKey&) const = default;
};

struct EvalCell {
  int64_t n = 0, correct = 0;
  // Beside `exact`, where that ran too: the most likely first token, and the cosine of its logits.
  int64_t first_equal = 0, first_compared = 0;
  std::vector<double> cosines;
  std::vector<double> ttft_ms;
  int64_t prompt_tokens = 0, cached = 0, aligned = 0, recomputed = 0, computed = 0, fetched = 0, wire = 0;
  int64_t kv_bytes = 0;  // that the decode worker holds when it begins
};

class EvalReport {
 public:
  explicit EvalReport(std::vector<EvalGrouping> groupings = {}) : groupings_(std::move(groupings)) {}

  void Add(const EvalPlace& place, const EvalMethod& method, const TextResult& result, bool correct);
  // Logits behind the prompt, of the method and of `exact`. REQUIRES: equal, positive sizes.
  void AddFirstLogits(const EvalPlace& place, const EvalMethod& method, std::span<const float> logits,
                      std::span<const float> exact);

  // There are no (more) answers of this pair of methods: the cluster does not serve it, or failed.
  void Refuse(const EvalMethod& method, const std::string& why);

  void PrintTable() const;
  // "refused": method and why; "rows": the cells; "groups": each cell by position or turn, where asked for; "turns":
  // every answer of samples with more than one.
  nlohmann::json ToJson() const;
  // Self-contained: for each length and provenance accuracy over time to first token, and where prefill methods were
  // crossed with decode methods the accuracy of every pair; for each length that time over the history; the tables.
  std::string ToHtml(const std::string& title) const;

 private:
  // Of a grouping: how values are sorted, and how they are written.
  struct Group {
    int64_t order = 0;
    std::string name;
    auto operator<=>(const Group&) const = default;
  };
  using Groups = std::map<Group, EvalCell>;
  struct Turn {
    EvalPlace place;
    EvalKey key;
    int64_t prompt_tokens = 0, cached = 0;
    double ttft_ms = 0;
    bool correct = false;
  };

  static EvalKey KeyOf(const EvalPlace& place, const EvalMethod& method);
  static Group GroupOf(EvalGrouping grouping, const EvalPlace& place);
  // (task, length) that `exact` answers at 80 % or more. Empty without `exact`.
  std::set<std::pair<std::string, int64_t>> CoreTasks() const;
  // Each cell summed up over the core tasks of its length.
  std::map<EvalKey, EvalCell> CoreAverages() const;
  // The groups of all cells, and then of their sums over the core tasks.
  std::vector<std::pair<EvalKey, Groups>> GroupRows(EvalGrouping grouping) const;
  void PrintGroups(EvalGrouping grouping) const;
  std::string GroupTable(EvalGrouping grouping) const;
  // What a plot of one length and provenance shows: all methods, or one side with the other's plain method.
  enum class PlotOf { kAll, kPrefill, kDecode };
  std::string Plot(int64_t length, const std::string& provenance, PlotOf of) const;
  std::string PairTable(int64_t length, const std::string& provenance) const;
  // Prefill methods were crossed with decode methods.
  bool IsCrossed() const;
  std::string HistoryPlot(int64_t length) const;

  const std::vector<EvalGrouping> groupings_;
  std::map<EvalKey, EvalCell> cells_;
  std::map<EvalGrouping, std::map<EvalKey, Groups>> groups_;
  std::vector<Turn> turns_;
  std::map<std::pair<std::string, std::string>, std::string> refused_;  // reuse and decode labels; why
};

}  // namespace spl::cli
