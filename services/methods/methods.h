// The methods by name, and what programs must know of each before any of its code runs: the one list that router,
// workers, engine and command line read. No engine inside.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace spl::methods {

// Names that the programs themselves use.
inline constexpr std::string_view kAuto = "auto";
inline constexpr std::string_view kExact = "exact";
inline constexpr std::string_view kSparseX = "sparsex";
inline constexpr std::string_view kSplice = "splice";
inline constexpr std::string_view kDense = "dense";
inline constexpr std::string_view kHeadClassSelector = "head_classes";
inline constexpr std::string_view kStrict = "strict";      // ReuseOptions.quality
inline constexpr std::string_view kBalanced = "balanced";  // the same

enum class HeadClasses : uint8_t {
  kNever,
  kOptional,  // a policy: with ReuseOptions.head_classes. A selector: whatever the prompt was computed with
  kAlways,
};

// Decides which KV of earlier text a prompt uses and which of its rows are computed.
struct Policy {
  std::string_view name;
  std::string_view help;         // one line
  bool is_baseline = false;      // a published method, there to be compared with
  bool reuses_segments = false;  // KV of marked segments is moved to new positions; false: leading tokens only
  HeadClasses head_classes = HeadClasses::kNever;
  bool runs_whole_spans = false;   // the executor needs room for all rows of a prompt (ExecutorOptions::max_span_rows)
  bool leaves_out_tokens = false;  // decoding reads less than the prompt's KV
  bool needs_full_attention = false;   // no layer of the model may have a sliding window
  uint32_t max_segments = UINT32_MAX;  // that a prompt may mark
};

// Decides which tokens a decode step attends to.
struct Selector {
  std::string_view name;
  std::string_view help;
  bool is_baseline = false;
  bool chooses = true;        // false: a step attends to all that the prompt's policy kept
  bool reads_prompt = false;  // the prompt's last tokens run once more: the decode worker is sent the prompt
  HeadClasses head_classes = HeadClasses::kNever;
  // Defaults of DecodeOptions.
  int32_t budget = 1024, window = 16, recent = 16;
};

std::span<const Policy> Policies();
std::span<const Selector> Selectors();
// Null: there is none of that name. "" and "auto" are no names.
const Policy* FindPolicy(std::string_view name);
const Selector* FindSelector(std::string_view name);
// Whether a policy moves KV of marked segments. One that is not known here may.
inline bool ReusesSegments(std::string_view policy) {
  const Policy* const found = FindPolicy(policy);
  return found == nullptr || found->reuses_segments;
}
std::string PolicyNames();    // "exact, sparsex, …": for messages
std::string SelectorNames();  // the same

inline bool IsAuto(std::string_view name) { return name.empty() || name == kAuto; }

// The policy that a request asks for: strict quality (quality.h) is exact, whatever it names.
std::string_view PolicyOf(std::string_view policy, std::string_view quality);
// The policy that "auto" stands for where the model's method is `best`. Under a contract (Quality::agreement above 0)
// it is sparsex, because a contract is with exact, which is decoded from everything: windows of heads would break it
// behind the first token. Otherwise, and while the model is not known (""), it is `best`.
std::string_view BestUnder(double agreement, std::string_view best);
// The policy that runs: "auto" is `best`, the model's (ModelIdentity.default_reuse), when the prompt `has_segments`,
// marked ones or such as are looked for; else exact.
std::string_view ResolvePolicy(std::string_view policy, bool has_segments, std::string_view best);
// The selector that runs behind a prompt with head classes, or without.
std::string_view ResolveSelector(std::string_view selector, bool has_head_classes);
// Whether a step behind a prompt without head classes attends to everything.
inline bool IsDense(std::string_view selector) { return ResolveSelector(selector, false) == kDense; }

}  // namespace spl::methods
