#include "services/engine/model/head_class_import.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>

#include "services/base/field_error.h"
#include "services/base/json_object_reader.h"
#include "services/base/json_parser.h"
#include "services/base/status.h"

namespace spl::engine {
namespace {

using nlohmann::json;
using Fields = JsonObjectReader<json>;

constexpr int32_t kRedKnotSinks = 4;

// A list of num_layers lists of num_kv_heads entries. Null: Fail was called.
const json* Table(Fields& fields, const char* field, int32_t num_layers, int32_t num_kv_heads) {
  const json* table = fields.List(field);
  if (table == nullptr) return nullptr;
  const bool right = table->size() == static_cast<size_t>(num_layers) &&
                     std::all_of(table->begin(), table->end(), [&](const json& row) {
                       return row.is_array() && row.size() == static_cast<size_t>(num_kv_heads);
                     });
  if (!right) fields.Fail(field, fmt::format("must be {} lists of {} heads", num_layers, num_kv_heads));
  return right ? table : nullptr;
}

}  // namespace

absl::StatusOr<HeadClassMap> ImportDuoAttention(const std::string& tsv, const std::string& source,
                                                const HeadPreset& preset) {
  std::vector<double> gates;
  size_t num_columns = 0, num_rows = 0;
  std::istringstream lines(tsv);
  for (std::string line; std::getline(lines, line);) {
    if (line.find_first_not_of(" \r") == std::string::npos) continue;
    ++num_rows;
    size_t columns = 0;
    std::istringstream cells(line);
    for (std::string cell; std::getline(cells, cell, '\t');) {
      ++columns;
      const auto begin = cell.find_first_not_of(" \r"), last = cell.find_last_not_of(" \r");
      double gate = 0;
      const char* const end = begin == std::string::npos ? nullptr : cell.data() + last + 1;
      if (end == nullptr || std::from_chars(cell.data() + begin, end, gate).ptr != end || !std::isfinite(gate))
        return InvalidArgument("{}: line {} column {} is '{}', not a number", source, num_rows, columns, cell);
      gates.push_back(gate);
    }
    if (num_rows == 1) num_columns = columns;
    if (columns != num_columns)
      return InvalidArgument("{}: line {} has {} columns, the first one {}", source, num_rows, columns, num_columns);
  }
  if (gates.empty()) return InvalidArgument("{}: no gates", source);
  std::vector<size_t> order(gates.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return gates[a] > gates[b]; });
  const auto num_global = static_cast<size_t>(std::lround(preset.global_share * static_cast<double>(gates.size())));
  std::vector<HeadClass> classes(gates.size(), {.is_global = false, .window = preset.window, .sinks = preset.sinks});
  for (size_t i = 0; i < order.size(); ++i) {
    if (i < num_global || order[i] < static_cast<size_t>(preset.dense_prefix_layers) * num_columns)
      classes[order[i]] = {};
  }
  HeadClassMap map(static_cast<int32_t>(num_rows), static_cast<int32_t>(num_columns), std::move(classes));
  map.set_preset("duoattention-" + preset.name);
  return map;
}

absl::StatusOr<HeadClassMap> ImportRedKnot(const std::string& text, const std::string& source) {
  SPLICE_ASSIGN_OR_RETURN(const json root, ParseJsonObject(text, source));
  Fields fields(root, source + ": ");
  const int32_t num_layers = fields.RequireInt("num_layers", 1, 4096),
                num_kv_heads = fields.RequireInt("num_kv_heads", 1, 4096);
  const int32_t dense_prefix = fields.IntOr("dense_prefix_layers", 0, num_layers, 0);
  if (!fields.Has("kv_head_classification")) fields.Fail("kv_head_classification", "is missing");
  if (!fields.Has("kv_head_max_distance")) fields.Fail("kv_head_max_distance", "is missing");
  const json* names = Table(fields, "kv_head_classification", num_layers, num_kv_heads);
  const json* distances = Table(fields, "kv_head_max_distance", num_layers, num_kv_heads);
  const json* sinks = Table(fields, "kv_head_sink_size", num_layers, num_kv_heads);
  SPLICE_RETURN_IF_ERROR(fields.status());
  std::vector<HeadClass> classes;
  for (int32_t layer = 0; layer < num_layers; ++layer) {
    for (int32_t head = 0; head < num_kv_heads; ++head) {
      const auto entry = [&](const json* table) { return (*table)[layer][head]; };
      const auto fail = [&](const char* field, const json& value) {
        return FieldError(fmt::format("{}: {}", source, field),
                          fmt::format("layer {} head {} must not be {}", layer, head, value.dump()));
      };
      HeadClass& out = classes.emplace_back();
      const json name = entry(names), distance = entry(distances),
                 sink = sinks == nullptr ? json(kRedKnotSinks) : entry(sinks);
      if (name != "global" && name != "retrieval" && name != "dense" && name != "local" && name != "local_full")
        return fail("kv_head_classification", name);
      if (!distance.is_number_integer() || distance.get<int64_t>() > kHeadWindowMax)
        return fail("kv_head_max_distance", distance);
      if (!sink.is_number_integer() || sink.get<int64_t>() < 0 || sink.get<int64_t>() > kHeadWindowMax)
        return fail("kv_head_sink_size", sink);
      const bool local = (name == "local" || name == "local_full") && distance.get<int64_t>() >= 1;
      if (local && layer >= dense_prefix) out = {false, distance.get<int32_t>(), sink.get<int32_t>()};
    }
  }
  HeadClassMap map(num_layers, num_kv_heads, std::move(classes));
  map.set_preset("redknot");
  return map;
}

}  // namespace spl::engine
