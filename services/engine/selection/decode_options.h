// A request's options for decoding.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "kernels/common/token_selection.h"
#include "kernels/selection/loopserve/query_window.h"
#include "services/engine/model/model_config.h"
#include "services/engine/model/option_field.h"

namespace spl::engine {

// Dimensions of keys that are not packed, unless a request names another number.
inline constexpr int32_t kCompactDims = 16;

// Share of the attention below which `adaptive` gives a head everything, unless a request names another one.
inline constexpr double kMassFloor = 0;

struct DecodeOptions {
  std::string selector;  // name of the decode method; "" and "auto": the best that this build has for the sequence
  // Tokens that a head attends to in a step (docs/methods/sparcas.md, docs/methods/loopserve.md,
  // docs/methods/baselines.md). For snapkv and adakv: tokens of the prompt; generated tokens come on top. -1:
  // 2,048 (sparcas, quest, snapkv) or 1,024 (loopserve, cascade, streaming, adakv, h2o).
  int32_t budget = -1;
  int32_t dense_layers = 2;  // first layers that attend to everything
  int32_t recent = -1;       // last tokens, which are always attended; -1: 64 (sparcas, cascade), 16 (quest, loopserve)
  // SparCas.
  // Dimensions of each key that score its token; -1: packed keys where the backend serves them, or kCompactDims.
  int32_t dims = -1;
  // Decided by WithKeys (selection_methods.h), no option of a request: the keys that score are packed keys
  // (kernels/selection/sparcas/packed_keys.h).
  bool packed_keys = false;
  int32_t refresh_interval = 64;  // most steps between two choices of dimensions; fewer at the start of an answer
  // LoopServe, cascade: the last queries whose attention decides the choice, and also the steps between two choices.
  // SnapKV, AdaKV: the last rows of the prompt whose attention decides it. -1: 16 (loopserve, cascade), 32 (others).
  int32_t window = -1;
  // Cascade: tokens that a choice of the last queries keeps, among which every step chooses; -1: 4 · budget.
  int32_t candidates = -1;
  // StreamingLLM.
  int32_t sinks = 4;
  // Adaptive: share of a head's attention that its chosen tokens must hold (runtime/mass_guard.h); 0: any.
  double mass_floor = kMassFloor;

  DecodeOptions() = default;
  DecodeOptions(std::string name) : selector(std::move(name)) {}  // NOLINT: a name alone is enough
  DecodeOptions(const char* name) : selector(name) {}             // NOLINT
};

// Every member except `selector`, by its name in the API, with its range.
inline constexpr OptionField<DecodeOptions> kDecodeOptionFields[] = {
    {"decode_budget", &DecodeOptions::budget, 1, kernels::kSelectBudgetMax},
    {"decode_dense_layers", &DecodeOptions::dense_layers},
    {"decode_recent", &DecodeOptions::recent, 1, kernels::kSelectBudgetMax},
    {"decode_dims", &DecodeOptions::dims},
    {"decode_refresh_interval", &DecodeOptions::refresh_interval, 1, 1 << 20},
    {"decode_window", &DecodeOptions::window, 1, kernels::kQueryWindowMax},
    {"decode_candidates", &DecodeOptions::candidates, 1, kernels::kSelectBudgetMax},
    {"decode_sinks", &DecodeOptions::sinks, 0, kernels::kSelectBudgetMax},
    {"decode_mass_floor", &DecodeOptions::mass_floor},
};

// InvalidArgument names the field as the API has it, its value and its range.
absl::Status ValidateDecodeOptions(const DecodeOptions& options, const ModelConfig& config);

}  // namespace spl::engine
