// Results of an evaluation in cells of (task, length, method, provenance), written as a table, JSON and one HTML page.
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

// Property that splits the answers of a cell into groups.
enum class EvalGrouping {
  kPosition,  // place of the question in the new text of its turn
  kTurn,
};
absl::StatusOr<EvalGrouping> ParseEvalGrouping(const std::string& name);  // "position", "turn"
const char* EvalGroupingName(EvalGrouping grouping);

// One place in a sample at which the model must answer.
struct EvalPlace {
  std::string id, task;
  int64_t length = 0;               // nominal length of the sample
  int64_t turn = 1, num_turns = 1;  // from 1
  std::string position;             // "begin", "middle", "end"; empty: unknown
  int64_t history_tokens = 0;       // tokens of the prompt up to the end of the last answer
};

struct EvalKey {
  std::string task;
  int64_t length = 0;
  std::string reuse, decode;  // labels in the user's spelling
  std::string provenance;     // "-": the method reuses nothing
  auto operator<=>(const EvalKey&) const = default;
};

struct EvalCell {
  int64_t n = 0, correct = 0;
  // Comparison with `exact`, if that ran, too: equal most likely first tokens, and cosines of the first logits.
  int64_t first_equal = 0, first_compared = 0;
  std::vector<double> cosines;
  std::vector<double> ttft_ms;
  int64_t prompt_tokens = 0, cached = 0, aligned = 0, recomputed = 0, computed = 0, fetched = 0, wire = 0;
  int64_t same_context = 0, isolated = 0, foreign = 0;  // aligned tokens by context (docs/segments.md, Provenance)
  int64_t kv_bytes = 0;                                 // KV that the decode worker holds when it begins
};

class EvalReport {
 public:
  explicit EvalReport(std::vector<EvalGrouping> groupings = {}) : groupings_(std::move(groupings)) {}

  void Add(const EvalPlace& place, const EvalMethod& method, const TextResult& result, bool correct);
  // Adds the logits behind the prompt, of the method and of `exact`. REQUIRES: equal, positive sizes.
  void AddFirstLogits(const EvalPlace& place, const EvalMethod& method, std::span<const float> logits,
                      std::span<const float> exact);

  // Records why this pair of methods has no (more) answers: the cluster does not serve it, or failed.
  void Refuse(const EvalMethod& method, const std::string& why);

  void PrintTable() const;
  // Members: "refused": methods and reasons; "rows": the cells; "groups": each cell by position or turn, if asked for;
  // "turns": every answer of samples with several answers.
  nlohmann::json ToJson() const;
  // A self-contained page with the tables and these plots. For each length and provenance: accuracy over TTFT, and the
  // accuracy of every pair if prefill methods were crossed with decode methods. For each length: TTFT over the length
  // of the history.
  std::string ToHtml(const std::string& title) const;

 private:
  // A value of a grouping: its place in the order, and its name.
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
  // (task, length) pairs that `exact` answers at 80 % or more. Empty: `exact` did not run.
  std::set<std::pair<std::string, int64_t>> CoreTasks() const;
  // Sums of cells over the core tasks of a length.
  std::map<EvalKey, EvalCell> CoreAverages() const;
  // The groups of all cells, followed by those of their sums over the core tasks.
  std::vector<std::pair<EvalKey, Groups>> GroupRows(EvalGrouping grouping) const;
  void PrintGroups(EvalGrouping grouping) const;
  std::string GroupTable(EvalGrouping grouping) const;
  // Methods in a plot of one length and provenance: all, or one side combined with the plain method of the other.
  enum class PlotOf { kAll, kPrefill, kDecode };
  std::string Plot(int64_t length, const std::string& provenance, PlotOf of) const;
  std::string PairTable(int64_t length, const std::string& provenance) const;
  // True if several prefill methods were crossed with several decode methods.
  bool IsCrossed() const;
  std::string HistoryPlot(int64_t length) const;

  const std::vector<EvalGrouping> groupings_;
  std::map<EvalKey, EvalCell> cells_;
  std::map<EvalGrouping, std::map<EvalKey, Groups>> groups_;
  std::vector<Turn> turns_;
  std::map<std::pair<std::string, std::string>, std::string> refused_;  // reuse and decode labels → reason
};

}  // namespace spl::cli
