// splice profile: measures which KV heads need the whole context; makes, imports and shows head_classes.json. Makes
// recovery.json from answers.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "services/base/status.h"
#include "services/engine/model/checkpoint.h"
#include "services/engine/model/head_class_import.h"
#include "services/engine/model/model_identity.h"
#include "services/engine/profile/head_profiler.h"
#include "services/tokenizer/tokenizer.h"
#include "services/worker_flags/worker_flags.h"
#include "tools/cli/command.h"
#include "tools/cli/eval_data.h"
#include "tools/cli/head_class_picture.h"
#include "tools/cli/load_model.h"
#include "tools/cli/model_fetch.h"
#include "tools/cli/progress_line.h"
#include "tools/cli/recovery_choice.h"

namespace spl::cli {
namespace {

struct Flags {
  ModelSource model;
  std::string tokenizer_dir, backend = "auto", preset = "safe", ranking = "edge";
  std::string import_file, show_file, from_file, quality_file, recovery_file, out_file, svg_file;
  std::vector<std::string> data;
  int32_t num_threads = 0, text_tokens = 2048, chunk_tokens = 512;
  int64_t num_texts = 24;
  // Replace the preset's values; negative: the preset's.
  double global_share = -1;
  int32_t window = -1, sinks = -1;
  double ffn_mass = -1;
};

struct CalibrationText {
  std::vector<int32_t> ids;
  int32_t num_answer_tokens = 0;
};

absl::StatusOr<engine::HeadPreset> PresetOf(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(engine::HeadPreset preset, engine::FindHeadPreset(flags.preset));
  if (flags.global_share >= 0) preset.global_share = flags.global_share;
  if (flags.window >= 0) preset.window = flags.window;
  if (flags.sinks >= 0) preset.sinks = flags.sinks;
  if (flags.global_share >= 0 || flags.window >= 0 || flags.sinks >= 0) preset.name += " (changed)";
  preset.ranking = flags.ranking == "combined" ? engine::HeadRanking::kCombined : engine::HeadRanking::kEdge;
  return preset;
}

absl::Status WriteFile(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << text;
  out.close();
  if (!out) return Errorf(absl::StatusCode::kUnavailable, "{}: cannot be written", path);
  return absl::OkStatus();
}

bool EndsWith(const std::string& text, std::string_view end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Reads calibration texts: samples of evaluation sets that have one answer, at their end, and fit the longest text;
// other files are plain text, which is cut into pieces. Takes the same number from every file, so that no task decides
// alone.
absl::StatusOr<std::vector<CalibrationText>> ReadTexts(const Flags& flags, const tokenizer::Tokenizer& tokenizer) {
  const auto shortest = static_cast<size_t>(2 * flags.chunk_tokens), longest = static_cast<size_t>(flags.text_tokens);
  const auto of_each = static_cast<size_t>((flags.num_texts + static_cast<int64_t>(flags.data.size()) - 1) /
                                           static_cast<int64_t>(flags.data.size()));
  std::vector<CalibrationText> texts;
  for (const std::string& path : flags.data) {
    const size_t before = texts.size();
    const auto encode = [&](const std::string& text) {
      return tokenizer.Encode(text, {.add_special_tokens = false, .parse_special_tokens = true});
    };
    if (EndsWith(path, ".jsonl") || EndsWith(path, ".jsonl.xz")) {
      SPLICE_ASSIGN_OR_RETURN(std::vector<EvalSample> samples, LoadEvalData(path));
      // Takes the longest that fit first, because a window leaves out most of them.
      std::stable_sort(samples.begin(), samples.end(),
                       [](const EvalSample& a, const EvalSample& b) { return a.length > b.length; });
      for (const EvalSample& sample : samples) {
        if (texts.size() - before == of_each) break;
        if (sample.answers.size() != 1) continue;
        std::string text;
        for (const EvalSegment& segment : sample.segments) text += segment.text;
        SPLICE_ASSIGN_OR_RETURN(std::vector<int32_t> ids, encode(text));
        SPLICE_ASSIGN_OR_RETURN(const std::vector<int32_t> answer, encode(sample.answers[0]));
        ids.insert(ids.end(), answer.begin(), answer.end());
        if (ids.size() < shortest || ids.size() > longest) continue;
        texts.push_back({std::move(ids), static_cast<int32_t>(answer.size())});
      }
    } else {
      SPLICE_ASSIGN_OR_RETURN(const std::string text, ReadMaybeXz(path));
      SPLICE_ASSIGN_OR_RETURN(const std::vector<int32_t> ids, encode(text));
      for (size_t at = 0; at + shortest <= ids.size() && texts.size() - before < of_each; at += longest)
        texts.push_back({{ids.begin() + static_cast<int64_t>(at),
                          ids.begin() + static_cast<int64_t>(std::min(ids.size(), at + longest))},
                         0});
    }
    if (texts.size() == before)
      return InvalidArgument("{}: no text of {} tokens (twice --chunk-tokens) to {} (--text-tokens)", path, shortest,
                             longest);
  }
  if (texts.size() < 2)
    return absl::InvalidArgumentError("at least two calibration texts are needed: give more --data");
  return texts;
}

absl::StatusOr<engine::HeadClassMap> Profile(const Flags& flags) {
  if (flags.data.empty()) return absl::InvalidArgumentError("--data is needed: text to calibrate with");
  SPLICE_ASSIGN_OR_RETURN(const engine::HeadPreset preset, PresetOf(flags));
  SPLICE_ASSIGN_OR_RETURN(
      const auto tokenizer,
      tokenizer::Tokenizer::Load(flags.tokenizer_dir.empty() ? flags.model.dir : flags.tokenizer_dir));
  SPLICE_ASSIGN_OR_RETURN(const auto texts, ReadTexts(flags, *tokenizer));
  ModelSource source = flags.model;
  source.head_classes = "none";  // this command makes the map beside the model
  SPLICE_ASSIGN_OR_RETURN(const auto model, LoadModelAndShow(source, flags.backend, "auto"));
  SPLICE_ASSIGN_OR_RETURN(const auto profiler,
                          engine::HeadProfiler::Create(model, {.window = preset.window,
                                                               .sinks = preset.sinks,
                                                               .chunk_tokens = flags.chunk_tokens,
                                                               .max_text_tokens = flags.text_tokens,
                                                               .executor = {.num_threads = flags.num_threads}}));
  ProgressLine progress;
  for (size_t i = 0; i < texts.size(); ++i) {
    SPLICE_RETURN_IF_ERROR(profiler->Add(texts[i].ids, texts[(i + 1) % texts.size()].ids, texts[i].num_answer_tokens));
    progress.Update(i + 1, texts.size(), fmt::format("{} of {} texts", i + 1, texts.size()));
  }
  progress.Finish();
  const engine::ModelConfig& config = model->config();
  engine::HeadClassMap map =
      engine::HeadClassMap::FromProfile(config.num_layers, config.num_kv_heads, profiler->Result(), preset);
  map.set_model_fingerprint(model->fingerprint());
  return map;
}

// Makes other classes from an existing profile.
absl::StatusOr<engine::HeadClassMap> Reclassify(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const engine::HeadPreset preset, PresetOf(flags));
  SPLICE_ASSIGN_OR_RETURN(const engine::HeadClassMap measured, engine::HeadClassMap::Load(flags.from_file));
  if (measured.profile().empty())
    return InvalidArgument("{}: holds no profile to make classes from; it was imported or made by hand",
                           flags.from_file);
  auto map =
      engine::HeadClassMap::FromProfile(measured.num_layers(), measured.num_kv_heads(), measured.profile(), preset);
  map.set_model_fingerprint(measured.model_fingerprint());
  return map;
}

absl::StatusOr<engine::HeadClassMap> Import(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const engine::HeadPreset preset, PresetOf(flags));
  SPLICE_ASSIGN_OR_RETURN(const std::string text, ReadMaybeXz(flags.import_file));
  return EndsWith(flags.import_file, ".tsv") ? engine::ImportDuoAttention(text, flags.import_file, preset)
                                             : engine::ImportRedKnot(text, flags.import_file);
}

// Reads the quality of a map from the output of `splice eval --json` for the methods exact and splice: right answers of
// the tasks that exact answers at 80 % or more, if both were asked.
absl::StatusOr<engine::HeadQuality> ReadQuality(const std::string& path) {
  SPLICE_ASSIGN_OR_RETURN(const std::string text, ReadMaybeXz(path));
  const nlohmann::json root = nlohmann::json::parse(text, nullptr, false);
  if (!root.is_object() || !root.contains("rows"))
    return InvalidArgument("{}: not written by splice eval --json", path);
  std::map<std::pair<std::string, int64_t>, const nlohmann::json*> exact, splice;
  for (const nlohmann::json& row : root["rows"]) {
    const std::string task = row.value("task", ""), reuse = row.value("reuse", "");
    if (task == "core tasks") continue;  // sum of the other rows
    if (reuse == "exact") exact[{task, row.value("length", int64_t{0})}] = &row;
    // Isolated segments are the harder case.
    auto& entry = splice[{task, row.value("length", int64_t{0})}];
    if (reuse == "splice" && (entry == nullptr || row.value("provenance", "") == "isolated")) entry = &row;
  }
  engine::HeadQuality quality;
  std::set<int64_t> lengths;
  for (const auto& [key, row] : exact) {
    const nlohmann::json* other = splice[key];
    if (other == nullptr || row->value("accuracy", 0.0) < 0.8) continue;
    const auto right = [](const nlohmann::json& r) {
      return std::llround(r.value("accuracy", 0.0) * static_cast<double>(r.value("n", int64_t{0})));
    };
    quality.samples += row->value("n", int64_t{0});
    quality.exact += right(*row);
    quality.splice += right(*other);
    lengths.insert(key.second);
  }
  if (quality.samples == 0) return InvalidArgument("{}: no task in which exact and splice were both measured", path);
  quality.data = fmt::format("core tasks of {} tokens", fmt::join(lengths, ", "));
  quality.longest = *lengths.rbegin();
  return quality;
}

absl::Status RunRecovery(const Flags& flags) {
  if (flags.model.dir.empty()) return InvalidArgument("--recovery-from needs --model, whose profile it becomes");
  SPLICE_ASSIGN_OR_RETURN(const engine::ModelConfig config, engine::LoadModelConfig(flags.model.dir));
  SPLICE_ASSIGN_OR_RETURN(const engine::Checkpoint checkpoint, engine::Checkpoint::Open(flags.model.dir));
  SPLICE_ASSIGN_OR_RETURN(const std::string text, ReadMaybeXz(flags.recovery_file));
  auto profile = ChooseRecovery(nlohmann::json::parse(text, nullptr, false), config.num_layers);
  if (!profile.ok()) return Annotate(profile.status(), flags.recovery_file);
  profile->fingerprint = engine::FolderFingerprint(config, checkpoint);
  fmt::print(
      "a probe of {} of {} layers, of which the last {} score, and {:g} % of the reused tokens: {} of {} answers "
      "right, "
      "exact {} ({})\n",
      profile->probe_layers, profile->num_layers, profile->score_layers, 100 * profile->recompute_share, profile->right,
      profile->answers, profile->exact, profile->data);
  if (flags.out_file.empty()) return absl::OkStatus();
  SPLICE_RETURN_IF_ERROR(WriteFile(flags.out_file, profile->ToJson()));
  fmt::print("written to {}\n", flags.out_file);
  return absl::OkStatus();
}

absl::Status RunProfile(const Flags& flags) {
  if (!flags.recovery_file.empty()) return RunRecovery(flags);
  const auto make = [&]() -> absl::StatusOr<engine::HeadClassMap> {
    if (!flags.show_file.empty()) return engine::HeadClassMap::Load(flags.show_file);
    if (!flags.from_file.empty()) return Reclassify(flags);
    return flags.import_file.empty() ? Profile(flags) : Import(flags);
  };
  SPLICE_ASSIGN_OR_RETURN(engine::HeadClassMap map, make());
  if (flags.ffn_mass >= 0) {
    engine::FfnSchedule ffn = map.ffn();
    ffn.mass = flags.ffn_mass;
    map.set_ffn(ffn);
  }
  if (!flags.quality_file.empty()) {
    SPLICE_ASSIGN_OR_RETURN(const engine::HeadQuality quality, ReadQuality(flags.quality_file));
    map.set_quality(quality);
    fmt::print("splice answers {} of {} rightly, exact {}: {}\n", quality.splice, quality.samples, quality.exact,
               quality.within_contract()
                   ? fmt::format("within two points, so reuse \"auto\" will be splice for prompts of up to {} tokens",
                                 quality.longest)
                   : "more than two points behind, so reuse \"auto\" stays sparsex");
  }
  fmt::print("{}{:.0f} % global; of 8K tokens {:.0f} % are kept, of 32K {:.0f} %\n", HeadClassTable(map),
             100 * map.global_share(), 100 * map.kept_share(8192), 100 * map.kept_share(32768));
  if (!flags.svg_file.empty())
    SPLICE_RETURN_IF_ERROR(WriteFile(flags.svg_file, HeadClassSvg(map, "Head classes: " + map.preset())));
  if (flags.out_file.empty()) return absl::OkStatus();
  SPLICE_RETURN_IF_ERROR(WriteFile(flags.out_file, map.ToJson()));
  fmt::print("written to {}\n", flags.out_file);
  return absl::OkStatus();
}

}  // namespace

Command MakeProfileCommand(CLI::App& root) {
  auto flags = std::make_shared<Flags>();
  CLI::App& app =
      *root.add_subcommand("profile", "What reuse must know of a model: makes head_classes.json and recovery.json");
  app.footer(
      "Examples:\n"
      "  splice profile --model models/splice-tiny --data vt.jsonl.xz,book.txt --out "
      "models/splice-tiny/head_classes.json\n"
      "  splice profile --import full_attention_heads.tsv --preset safe --out head_classes.json\n"
      "  splice profile --show models/splice-tiny/head_classes.json --svg heads.svg\n"
      "  splice profile --from head_classes.json --preset mid --out head_classes_mid.json\n"
      "  splice profile --model models/splice-tiny --recovery-from table.json --out models/splice-tiny/recovery.json\n"
      "Presets: safe (half of the heads global, window 256, 64 sinks, two dense layers), mid (a quarter, 1024, 64), "
      "paper\n"
      "(15 %, 256, 4). The table shows what a window loses where texts are answered (without answers:\n"
      "at its worst); G is a global head.");
  auto* source = app.add_option_group("source");
  AddModelSourceFlags(*source, flags->model, kModelHelp);
  source->add_option("--import", flags->import_file, "DuoAttention's full_attention_heads.tsv or RedKnot's JSON");
  source->add_option("--show", flags->show_file, "an existing head_classes.json");
  source->add_option("--from", flags->from_file, "an existing head_classes.json: other classes from its measurements");
  source->require_option(1);
  app.add_option("--data", flags->data, "calibration text: evaluation sets (.jsonl, .jsonl.xz) or plain text")
      ->delimiter(',');
  app.add_option("--preset", flags->preset, "safe, mid or paper")->capture_default_str();
  app.add_option("--global-share", flags->global_share, "share of global heads, instead of the preset's")
      ->check(CLI::Range(0.0, 1.0));
  app.add_option("--window", flags->window, "tokens of a local head's window, instead of the preset's")
      ->check(CLI::Range(1, engine::kHeadWindowMax));
  app.add_option("--sinks", flags->sinks, "first tokens that a local head keeps, instead of the preset's")
      ->check(CLI::Range(0, engine::kHeadWindowMax));
  app.add_option("--ffn-mass", flags->ffn_mass,
                 "share of importance whose rows run through feed-forward unless a request says it; 1: all rows, as "
                 "small models need")
      ->check(CLI::Range(0.01, 1.0));
  app.add_option("--rank", flags->ranking,
                 "rule for global heads: edge (heads whose window loses most, at its worst and where texts are "
                 "answered) or combined (RedKnot's: mean loss, or copies that go stale)")
      ->check(CLI::IsMember({"edge", "combined"}))
      ->capture_default_str();
  app.add_option("--quality-from", flags->quality_file,
                 "a table of splice eval --json with exact and splice: its result goes into the map");
  app.add_option("--recovery-from", flags->recovery_file,
                 "a table of splice eval --suite recovery --json: writes recovery.json, with the cheapest settings of "
                 "sparsex that answer as exact does")
      ->check(CLI::ExistingFile);
  app.add_option("--texts", flags->num_texts, "texts to measure")->check(CLI::Range(2, 100000))->capture_default_str();
  app.add_option("--text-tokens", flags->text_tokens, "tokens of a text at most")
      ->check(CLI::Range(256, 1 << 20))
      ->capture_default_str();
  app.add_option("--chunk-tokens", flags->chunk_tokens, "tokens whose prefix shift is measured")
      ->check(CLI::Range(16, 1 << 16))
      ->capture_default_str();
  app.add_option("--out", flags->out_file, "head_classes.json or recovery.json to write");
  app.add_option("--svg", flags->svg_file, "picture to write");
  app.add_option("--tokenizer", flags->tokenizer_dir, "folder with tokenizer.json; default: the model folder");
  app.add_option("--backend", flags->backend, "auto, cpu or cuda")->capture_default_str();
  app.add_option("--threads", flags->num_threads, "compute threads; 0: one per core")->check(CLI::Range(0, 1024));
  return {&app, [flags]() -> absl::Status {
            SPLICE_RETURN_IF_ERROR(ResolveModel(flags->model.dir));
            return RunProfile(*flags);
          }};
}

}  // namespace spl::cli
