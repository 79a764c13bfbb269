#include "tools/cli/recovery_choice.h"

#include <fmt/ranges.h>

#include <cmath>
#include <compare>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>

#include "services/base/status.h"
#include "tools/cli/eval_method.h"

namespace spl::cli {
namespace {

using nlohmann::json;

constexpr int64_t kAnswersMin = 100;
constexpr double kCoreAccuracy = 0.8;
constexpr double kPoint = 0.01;

struct Count {
  int64_t answers = 0, exact = 0, right = 0;
};

struct Setting {
  double share = 0;
  int32_t probe_layers = 0, score_layers = 0;
  auto operator<=>(const Setting&) const = default;
};

using Cell = std::pair<std::string, int64_t>;  // task, length

int64_t RightOf(const json& row) {
  return std::llround(row.value("accuracy", 0.0) * static_cast<double>(row.value("n", int64_t{0})));
}

// The setting of a row's label, if that names all three of its options and no other.
std::optional<Setting> SettingOf(const std::string& label) {
  const auto method = ParseEvalMethod(label, "auto", "isolated");
  if (!method.ok() || method->reuse != methods::kSparseX || method->options.size() != 3) return std::nullopt;
  const json& options = method->options;
  for (const char* name : {"probe_layers", "score_layers", "recompute_share"}) {
    if (!options.contains(name)) return std::nullopt;
  }
  return Setting{options["recompute_share"], options["probe_layers"], options["score_layers"]};
}

}  // namespace

absl::StatusOr<engine::RecoveryProfile> ChooseRecovery(const json& table, int32_t num_layers) {
  if (!table.is_object() || !table.contains("rows") || !table["rows"].is_array())
    return InvalidArgument("not written by splice eval --json");
  std::map<Cell, int64_t> exact;  // right answers
  std::set<int64_t> lengths;
  for (const json& row : table["rows"]) {
    if (row.value("reuse", "") != "exact" || row.value("task", "") == "core tasks") continue;
    if (row.value("accuracy", 0.0) < kCoreAccuracy) continue;
    exact[{row.value("task", ""), row.value("length", int64_t{0})}] = RightOf(row);
    lengths.insert(row.value("length", int64_t{0}));
  }
  std::map<Setting, std::map<std::string, Count>> settings;  // by provenance
  for (const json& row : table["rows"]) {
    const auto setting = SettingOf(row.value("reuse", ""));
    const auto own = exact.find({row.value("task", ""), row.value("length", int64_t{0})});
    if (!setting.has_value() || own == exact.end()) continue;
    Count& count = settings[*setting][row.value("provenance", "")];
    count.answers += row.value("n", int64_t{0});
    count.exact += own->second;
    count.right += RightOf(row);
  }
  if (settings.empty())
    return InvalidArgument(
        "no task that exact answers at 80 % or more has an answer of sparsex with probe_layers, score_layers and "
        "recompute_share: run splice eval --suite recovery");
  const auto sum = [](const std::map<std::string, Count>& counts) {
    Count all;
    for (const auto& [provenance, count] : counts) {
      all.answers += count.answers;
      all.exact += count.exact;
      all.right += count.right;
    }
    return all;
  };
  const std::pair<const Setting, std::map<std::string, Count>>*best = nullptr, *cheapest = nullptr;
  for (const auto& entry : settings) {
    const auto& [setting, counts] = entry;
    bool within = setting.probe_layers >= 1 && setting.probe_layers <= num_layers;
    for (const auto& [provenance, count] : counts) {
      if (count.answers < kAnswersMin)
        return InvalidArgument(
            "{} answers of one setting, {}: at least {} are needed to tell a point (more --data, or a larger --limit)",
            count.answers, provenance, kAnswersMin);
      within &= static_cast<double>(count.exact - count.right) <= kPoint * static_cast<double>(count.answers);
    }
    if (best == nullptr || sum(counts).right > sum(best->second).right) best = &entry;
    if (!within) continue;
    // Settings come in ascending order: the first is the cheapest, unless one as cheap scores with other layers.
    const auto cost = [](const Setting& s) { return std::pair(s.share, s.probe_layers); };
    if (cheapest == nullptr ||
        (cost(setting) == cost(cheapest->first) && sum(counts).right > sum(cheapest->second).right))
      cheapest = &entry;
  }
  if (cheapest == nullptr)
    return Errorf(absl::StatusCode::kFailedPrecondition,
                  "no setting answers within a point of exact in every provenance; the best, probe_layers {} with "
                  "recompute_share {}, answers {} where exact answers {} of {}: the defaults stay",
                  best->first.probe_layers, best->first.share, sum(best->second).right, sum(best->second).exact,
                  sum(best->second).answers);
  const auto& [setting, counts] = *cheapest;
  const Count all = sum(counts);
  return engine::RecoveryProfile{.num_layers = num_layers,
                                 .probe_layers = setting.probe_layers,
                                 .score_layers = setting.score_layers,
                                 .recompute_share = setting.share,
                                 .data = fmt::format("core tasks of {} tokens", fmt::join(lengths, ", ")),
                                 .answers = all.answers,
                                 .exact = all.exact,
                                 .right = all.right};
}

}  // namespace spl::cli
