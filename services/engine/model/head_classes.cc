#include "services/engine/model/head_classes.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "services/base/check.h"
#include "services/base/field_error.h"
#include "services/base/ids.h"
#include "services/base/json_object_reader.h"
#include "services/base/json_parser.h"
#include "services/base/read_file.h"
#include "services/base/status.h"
#include "services/engine/model/model_identity.h"

namespace spl::engine {
namespace {

using nlohmann::json;
using Fields = JsonObjectReader<json>;

constexpr char kFormat[] = "splice-head-classes-1";

const HeadPreset kPresets[] = {
    {"safe", 0.50, 256, 64, 2},
    {"mid", 0.25, 1024, 64, 0},
    {"paper", 0.15, 256, 4, 0},
};

// Reads a table [layer][kv_head]. `read` takes one entry and returns what is wrong with it, or nothing.
template <typename Read>
void ReadTable(Fields& fields, const char* field, int32_t num_layers, int32_t num_kv_heads, const Read& read) {
  const json* table = fields.List(field);
  if (table == nullptr) {
    if (!fields.Has(field)) fields.Fail(field, "is missing");
    return;
  }
  if (table->size() != static_cast<size_t>(num_layers))
    return fields.Fail(field, fmt::format("must have {} layers (num_layers), got {}", num_layers, table->size()));
  for (int32_t layer = 0; layer < num_layers; ++layer) {
    const json& row = (*table)[layer];
    if (!row.is_array() || row.size() != static_cast<size_t>(num_kv_heads))
      return fields.Fail(field, fmt::format("layer {} must be a list of {} heads", layer, num_kv_heads));
    for (int32_t head = 0; head < num_kv_heads; ++head) {
      const auto index = static_cast<size_t>(layer * num_kv_heads + head);
      if (const std::string why = read(index, row[head]); !why.empty())
        return fields.Fail(field, fmt::format("layer {} head {} {}", layer, head, why));
    }
  }
}

std::vector<float> ReadScores(Fields& fields, const char* field, int32_t num_layers, int32_t num_kv_heads) {
  std::vector<float> scores(num_layers * num_kv_heads);
  ReadTable(fields, field, num_layers, num_kv_heads, [&](size_t i, const json& value) -> std::string {
    if (!value.is_number() || value.get<double>() < 0 || value.get<double>() > 2)
      return fmt::format("must be a number in [0, 2], got {}", value.dump());
    scores[i] = value.get<float>();
    return "";
  });
  return scores;
}

absl::StatusOr<FfnSchedule> ReadFfn(const json& object, const std::string& path, int32_t num_layers) {
  FfnSchedule ffn;
  Fields fields(object, path);
  const auto share = [&](const char* field, double fallback) {
    const double value = fields.PositiveOr(field, fallback);
    if (value > 1) fields.Fail(field, fmt::format("must lie in (0, 1], got {}", value));
    return value;
  };
  ffn.mass = share("mass", ffn.mass);
  ffn.dense_layers = fields.IntOr("dense_layers", -1, num_layers, ffn.dense_layers);
  ffn.recent = fields.IntOr("recent", 0, kHeadWindowMax, ffn.recent);
  ffn.deep_layer = fields.IntOr("deep_layer", -1, num_layers, ffn.deep_layer);
  ffn.deep_mass = share("deep_mass", ffn.deep_mass);
  SPLICE_RETURN_IF_ERROR(fields.status());
  return ffn;
}

// Reads an integer of a local head. The entry of a global head is ignored.
auto IntoLocal(std::vector<HeadClass>& classes, int32_t HeadClass::*member, int32_t low, const char* what) {
  return [&classes, member, low, what](size_t i, const json& value) -> std::string {
    if (classes[i].is_global) return "";
    if (!value.is_number_integer() || value.get<int64_t>() < low || value.get<int64_t>() > kHeadWindowMax)
      return fmt::format("is local: its {} must lie in [{}, {}], got {}", what, low, kHeadWindowMax, value.dump());
    classes[i].*member = value.get<int32_t>();
    return "";
  };
}

template <typename Of>
json Table(int32_t num_layers, int32_t num_kv_heads, const Of& of) {
  json table = json::array();
  for (int32_t layer = 0; layer < num_layers; ++layer) {
    json row = json::array();
    for (int32_t head = 0; head < num_kv_heads; ++head)
      row.push_back(of(static_cast<size_t>(layer * num_kv_heads + head)));
    table.push_back(std::move(row));
  }
  return table;
}

}  // namespace

kernels::HeadVisibility HeadClass::visibility() const {
  if (is_global) return {};
  return {.rule = kernels::VisibilityRule::kBand, .num_sinks = sinks, .window = window};
}

int64_t HeadClass::kept_tokens(int64_t num_tokens) const {
  return is_global ? num_tokens : std::min<int64_t>(num_tokens, int64_t{window} + sinks);
}

std::span<const HeadPreset> HeadPresets() { return kPresets; }

absl::StatusOr<HeadPreset> FindHeadPreset(std::string_view name) {
  for (const HeadPreset& preset : kPresets) {
    if (preset.name == name) return preset;
  }
  return InvalidArgument("'{}' is not a preset of head classes: safe, mid, paper", name);
}

HeadClassMap::HeadClassMap(int32_t num_layers, int32_t num_kv_heads, std::vector<HeadClass> classes)
    : num_layers_(num_layers), num_kv_heads_(num_kv_heads), classes_(std::move(classes)) {
  SPLICE_CHECK(num_layers > 0 && num_kv_heads > 0 &&
                   classes_.size() == static_cast<size_t>(num_layers) * static_cast<size_t>(num_kv_heads),
               "one class for each layer and head");
  set_dense_layers(kDenseDecodeLayers);
}

void HeadClassMap::set_dense_layers(int32_t layers) {
  dense_layers_ = layers;
  std::string text = fmt::format("{}|{}|{}", kFormat, num_layers_, num_kv_heads_);
  for (const HeadClass& head : classes_) text += head.is_global ? "|g" : fmt::format("|{},{}", head.window, head.sinks);
  if (layers != kDenseDecodeLayers) text += fmt::format("|dense {}", layers);
  digest_ = chunk::Sha256(text);
}

HeadClassMap HeadClassMap::FromProfile(int32_t num_layers, int32_t num_kv_heads, HeadProfile profile,
                                       const HeadPreset& preset) {
  const auto num_heads = static_cast<size_t>(num_layers * num_kv_heads);
  SPLICE_CHECK(profile.edge_mass.size() == num_heads && profile.prefix_shift.size() == num_heads,
               "a profile of the model");
  std::vector<size_t> order(num_heads);
  std::iota(order.begin(), order.end(), size_t{0});
  const auto need = [&](size_t i) {
    if (preset.ranking == HeadRanking::kCombined) return std::max(profile.edge_mass[i], profile.prefix_shift[i]);
    return profile.answer_mass.empty() ? profile.edge_mass_q99[i] : profile.answer_mass[i];
  };
  const auto num_dense = std::min(num_heads, static_cast<size_t>(preset.dense_prefix_layers * num_kv_heads));
  std::stable_sort(order.begin() + static_cast<std::ptrdiff_t>(num_dense), order.end(),
                   [&](size_t a, size_t b) { return need(a) > need(b); });
  std::vector<HeadClass> classes(num_heads, {.is_global = false, .window = preset.window, .sinks = preset.sinks});
  const auto num_global = static_cast<size_t>(std::lround(preset.global_share * static_cast<double>(num_heads)));
  for (size_t i = 0; i < std::max(num_global, num_dense); ++i) classes[order[i]] = {};
  HeadClassMap map(num_layers, num_kv_heads, std::move(classes));
  map.preset_ = preset.name;
  map.profile_ = std::move(profile);
  return map;
}

HeadClassMap HeadClassMap::Spread(int32_t num_layers, int32_t num_kv_heads, const HeadPreset& preset) {
  const int64_t num_heads = int64_t{num_layers} * num_kv_heads;
  std::vector<HeadClass> classes(num_heads);
  const auto global_before = [&](int64_t i) { return std::llround(preset.global_share * static_cast<double>(i)); };
  for (int64_t i = 0; i < num_heads; ++i) {
    if (i >= preset.dense_prefix_layers * num_kv_heads && global_before(i + 1) == global_before(i))
      classes[i] = {.is_global = false, .window = preset.window, .sinks = preset.sinks};
  }
  HeadClassMap map(num_layers, num_kv_heads, std::move(classes));
  map.preset_ = preset.name;
  return map;
}

absl::StatusOr<HeadClassMap> HeadClassMap::Parse(const std::string& text, const std::string& source) {
  SPLICE_ASSIGN_OR_RETURN(const json root, ParseJsonObject(text, source));
  Fields fields(root, source + ": ");
  if (fields.StringOr("format", "") != kFormat)
    return FieldError(source + ": format",
                      fmt::format("must be \"{}\"; import other formats with splice profile --import", kFormat));
  const int32_t num_layers = fields.RequireInt("num_layers", 1, 4096),
                num_kv_heads = fields.RequireInt("num_kv_heads", 1, 4096);
  SPLICE_RETURN_IF_ERROR(fields.status());
  std::vector<HeadClass> classes(num_layers * num_kv_heads);
  ReadTable(fields, "class", num_layers, num_kv_heads, [&](size_t i, const json& value) -> std::string {
    if (value != "global" && value != "local")
      return fmt::format("must be \"global\" or \"local\", got {}", value.dump());
    classes[i].is_global = value == "global";
    return "";
  });
  ReadTable(fields, "window", num_layers, num_kv_heads, IntoLocal(classes, &HeadClass::window, 1, "window"));
  ReadTable(fields, "sinks", num_layers, num_kv_heads, IntoLocal(classes, &HeadClass::sinks, 0, "sinks"));
  std::vector<bool> whole_in_prefill;
  if (fields.Has("prefill")) {
    whole_in_prefill.resize(classes.size());
    ReadTable(fields, "prefill", num_layers, num_kv_heads, [&](size_t i, const json& value) -> std::string {
      if (value != "global" && value != "local")
        return fmt::format("must be \"global\" or \"local\", got {}", value.dump());
      if (classes[i].is_global && value == "local") return "is local, and its class is global";
      whole_in_prefill[i] = value == "global";
      return "";
    });
  }
  const int32_t dense_layers = fields.IntOr("dense_layers", 0, num_layers, kDenseDecodeLayers);
  HeadProfile profile;
  if (const json* object = fields.Object("profile"); object != nullptr) {
    Fields inner(*object, source + ": profile.");
    profile.num_tokens = inner.RequireInt("num_tokens", 1, INT32_MAX);
    profile.edge_mass = ReadScores(inner, "edge_mass", num_layers, num_kv_heads);
    profile.edge_mass_q99 = ReadScores(inner, "edge_mass_q99", num_layers, num_kv_heads);
    profile.prefix_shift = ReadScores(inner, "prefix_shift", num_layers, num_kv_heads);
    if (inner.Has("answer_mass")) profile.answer_mass = ReadScores(inner, "answer_mass", num_layers, num_kv_heads);
    SPLICE_RETURN_IF_ERROR(inner.status());
  }
  FfnSchedule ffn;
  if (const json* object = fields.Object("ffn"); object != nullptr) {
    SPLICE_ASSIGN_OR_RETURN(ffn, ReadFfn(*object, source + ": ffn.", num_layers));
  }
  HeadQuality quality;
  if (const json* object = fields.Object("quality"); object != nullptr) {
    Fields inner(*object, source + ": quality.");
    quality.data = inner.StringOr("data", "");
    quality.samples = inner.RequireInt("samples", 1, INT32_MAX);
    quality.exact = inner.RequireInt("exact", 0, quality.samples);
    quality.splice = inner.RequireInt("splice", 0, quality.samples);
    if (inner.Has("longest")) quality.longest = inner.RequireInt("longest", 1, INT32_MAX);
    SPLICE_RETURN_IF_ERROR(inner.status());
  }
  const chunk::Digest fingerprint = ReadModelFingerprint(fields);
  const std::string preset = fields.StringOr("preset", "");
  SPLICE_RETURN_IF_ERROR(fields.status());
  HeadClassMap map(num_layers, num_kv_heads, std::move(classes));
  map.preset_ = preset;
  map.set_dense_layers(dense_layers);
  map.whole_in_prefill_ = std::move(whole_in_prefill);
  map.profile_ = std::move(profile);
  map.ffn_ = ffn;
  map.quality_ = quality;
  map.model_fingerprint_ = fingerprint;
  return map;
}

absl::StatusOr<HeadClassMap> HeadClassMap::Load(const std::string& path) {
  SPLICE_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  return Parse(text, path);
}

std::string HeadClassMap::ToJson() const {
  const auto table = [&](const auto& of) { return Table(num_layers_, num_kv_heads_, of); };
  nlohmann::ordered_json out;
  out["format"] = kFormat;
  if (model_fingerprint_ != chunk::Digest{}) out["model_fingerprint"] = HexEncode(model_fingerprint_);
  if (!preset_.empty()) out["preset"] = preset_;
  out["num_layers"] = num_layers_;
  out["num_kv_heads"] = num_kv_heads_;
  out["class"] = table([&](size_t i) { return classes_[i].is_global ? "global" : "local"; });
  out["window"] = table([&](size_t i) { return classes_[i].window; });
  out["sinks"] = table([&](size_t i) { return classes_[i].sinks; });
  if (!whole_in_prefill_.empty()) {
    out["prefill"] =
        table([&](size_t i) { return whole_in_prefill_[i] || classes_[i].is_global ? "global" : "local"; });
  }
  if (dense_layers_ != kDenseDecodeLayers) out["dense_layers"] = dense_layers_;
  if (ffn_ != FfnSchedule{}) {
    out["ffn"] = {{"mass", ffn_.mass},
                  {"dense_layers", ffn_.dense_layers},
                  {"recent", ffn_.recent},
                  {"deep_layer", ffn_.deep_layer},
                  {"deep_mass", ffn_.deep_mass}};
  }
  if (quality_.samples > 0) {
    out["quality"] = {
        {"data", quality_.data}, {"samples", quality_.samples}, {"exact", quality_.exact}, {"splice", quality_.splice}};
    if (quality_.longest > 0) out["quality"]["longest"] = quality_.longest;
  }
  if (!profile_.empty()) {
    // Four digits: more than the precision of a profile, and still readable.
    const auto rounded = [](float value) { return std::round(double{value} * 1e4) / 1e4; };
    auto& profile = out["profile"];
    profile["num_tokens"] = profile_.num_tokens;
    profile["edge_mass"] = table([&](size_t i) { return rounded(profile_.edge_mass[i]); });
    profile["edge_mass_q99"] = table([&](size_t i) { return rounded(profile_.edge_mass_q99[i]); });
    profile["prefix_shift"] = table([&](size_t i) { return rounded(profile_.prefix_shift[i]); });
    if (!profile_.answer_mass.empty())
      profile["answer_mass"] = table([&](size_t i) { return rounded(profile_.answer_mass[i]); });
  }
  // One line per member, and per layer of a table.
  std::string text = "{\n";
  const auto append = [&text](const auto& self, const nlohmann::ordered_json& object,
                              const std::string& indent) -> void {
    size_t left = object.size();
    for (const auto& [key, value] : object.items()) {
      text += indent + json(key).dump() + ": ";
      if (value.is_object()) {
        text += "{\n";
        self(self, value, indent + "  ");
        text += indent + "}";
      } else if (value.is_array()) {
        text += "[\n";
        for (size_t i = 0; i < value.size(); ++i)
          text += indent + "  " + value[i].dump() + (i + 1 < value.size() ? ",\n" : "\n");
        text += indent + "]";
      } else {
        text += value.dump();
      }
      text += --left > 0 ? ",\n" : "\n";
    }
  };
  append(append, out, "  ");
  return text + "}\n";
}

absl::Status HeadClassMap::CheckModel(int32_t num_layers, int32_t num_kv_heads,
                                      const chunk::Digest& model_fingerprint) const {
  if (num_layers != num_layers_ || num_kv_heads != num_kv_heads_)
    return Errorf(absl::StatusCode::kFailedPrecondition,
                  "the head classes are for {} layers of {} KV heads, the model has {} of {}", num_layers_,
                  num_kv_heads_, num_layers, num_kv_heads);
  if (model_fingerprint_ != chunk::Digest{} && model_fingerprint_ != model_fingerprint)
    return Errorf(
        absl::StatusCode::kFailedPrecondition,
        "the head classes were profiled on a model with the fingerprint {}…, this one has {}…: profile it with "
        "splice profile",
        HexEncode(model_fingerprint_).substr(0, 12), HexEncode(model_fingerprint).substr(0, 12));
  return absl::OkStatus();
}

kernels::HeadVisibility ClassVisibility(const HeadClass& head, const kernels::HeadVisibility& own) {
  if (head.is_global) return own;
  if (own.rule == kernels::VisibilityRule::kFull) return head.visibility();
  return {.rule = kernels::VisibilityRule::kBand,
          .num_sinks = std::min(own.num_sinks, head.sinks),
          .window = std::min(own.window, head.window)};
}

kernels::HeadVisibility ServedVisibility(const ModelConfig& config, const HeadClassMap& map, int32_t layer,
                                         int32_t kv_head) {
  return ClassVisibility(map.served(layer, kv_head), config.visibility(layer));
}

kernels::HeadVisibility PrefillVisibility(const ModelConfig& config, const HeadClassMap& map, int32_t layer,
                                          int32_t kv_head) {
  return ClassVisibility(map.in_prefill(layer, kv_head), config.visibility(layer));
}

double HeadClassMap::global_share() const {
  return static_cast<double>(
             std::count_if(classes_.begin(), classes_.end(), [](const HeadClass& head) { return head.is_global; })) /
         static_cast<double>(classes_.size());
}

double HeadClassMap::kept_share(int64_t num_tokens) const {
  if (num_tokens <= 0) return 1;
  int64_t kept = 0;
  for (const HeadClass& head : classes_) kept += head.kept_tokens(num_tokens);
  return static_cast<double>(kept) / (static_cast<double>(num_tokens) * static_cast<double>(classes_.size()));
}

}  // namespace spl::engine
