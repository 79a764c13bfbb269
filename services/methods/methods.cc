#include "services/methods/methods.h"

#include <algorithm>

#include "services/methods/quality.h"

namespace spl::methods {
namespace {

constexpr uint32_t kSamKvSegmentsMax = 1024;  // engine::kSamKvMaxDocuments

constexpr Policy kPolicies[] = {
    {.name = "exact", .help = "computes every token behind a prefix that is known"},
    {.name = "sparsex",
     .help = "moves KV of segments, and computes the tokens afresh that others attend to most",
     .reuses_segments = true},
    {.name = "splice",
     .help = "sparsex with head classes: local heads see and keep a window",
     .reuses_segments = true,
     .head_classes = HeadClasses::kAlways},
    {.name = "splice+",
     .help = "splice that computes a share of the prompt's rows at all (rec_frac)",
     .reuses_segments = true,
     .head_classes = HeadClasses::kAlways},
    {.name = "redknot",
     .help = "computes every token, with head classes and sparse feed-forward",
     .head_classes = HeadClasses::kAlways},
    {.name = "samkv",
     .help = "keeps only those parts of the segments that the question needs",
     .reuses_segments = true,
     .leaves_out_tokens = true,
     .needs_full_attention = true,
     .max_segments = kSamKvSegmentsMax},
    {.name = "naive",
     .help = "moves KV of segments, and computes none of it afresh",
     .is_baseline = true,
     .reuses_segments = true},
    {.name = "epic",
     .help = "computes the first tokens of each segment afresh",
     .is_baseline = true,
     .reuses_segments = true},
    {.name = "cacheblend",
     .help = "computes the tokens afresh whose values deviate most",
     .is_baseline = true,
     .reuses_segments = true},
    {.name = "loopserve",
     .help = "cold prompts: each head attends to the fewest columns and slashes that hold its attention",
     .head_classes = HeadClasses::kOptional,
     .runs_whole_spans = true},
    {.name = "minference",
     .help = "cold prompts: each head attends to a fixed number of columns and slashes",
     .is_baseline = true,
     .runs_whole_spans = true},
    {.name = "a-shape", .help = "cold prompts: every row sees first tokens and a window", .is_baseline = true},
    {.name = "tri-shape", .help = "a-shape, with last rows that see everything", .is_baseline = true},
};

constexpr Selector kSelectors[] = {
    {.name = "dense", .help = "attends to everything", .chooses = false},
    {.name = "head_classes",
     .help = "local heads attend to their window, behind a policy with head classes",
     .chooses = false,
     .head_classes = HeadClasses::kAlways},
    {.name = "sparcas",
     .help = "tokens by their scores in a few dimensions of the keys",
     .head_classes = HeadClasses::kOptional,
     .budget = 2048,
     .recent = 64},
    {.name = "adaptive",
     .help = "in every step everything, or the tokens that sparcas chooses, whichever takes less time",
     .head_classes = HeadClasses::kOptional,
     .budget = 2048,
     .recent = 64},
    {.name = "loopserve",
     .help = "tokens that the last queries attended to most, chosen anew as the answer grows",
     .head_classes = HeadClasses::kOptional},
    {.name = "cascade",
     .help = "loopserve with a longer list, of which sparcas chooses the tokens of every step",
     .head_classes = HeadClasses::kOptional,
     .recent = 64},
    {.name = "quest",
     .help = "pages of 16 tokens by bounds of their scores",
     .is_baseline = true,
     .head_classes = HeadClasses::kOptional,
     .budget = 2048},
    {.name = "streaming", .help = "first tokens and a window", .is_baseline = true},
    {.name = "snapkv",
     .help = "tokens of the prompt that its last rows attend to most",
     .is_baseline = true,
     .reads_prompt = true,
     .budget = 2048,
     .window = 32},
    {.name = "adakv",
     .help = "snapkv with a budget that heads share",
     .is_baseline = true,
     .reads_prompt = true,
     .window = 32},
    {.name = "h2o",
     .help = "tokens with most attention so far, and recent ones",
     .is_baseline = true,
     .reads_prompt = true},
};

template <typename Method>
const Method* Find(std::span<const Method> methods, std::string_view name) {
  const auto it = std::find_if(methods.begin(), methods.end(), [&](const Method& m) { return m.name == name; });
  return it == methods.end() ? nullptr : &*it;
}

template <typename Method>
std::string Names(std::span<const Method> methods) {
  std::string names;
  for (const Method& method : methods) names += (names.empty() ? "" : ", ") + std::string(method.name);
  return names;
}

}  // namespace

std::span<const Policy> Policies() { return kPolicies; }
std::span<const Selector> Selectors() { return kSelectors; }
const Policy* FindPolicy(std::string_view name) { return Find(Policies(), name); }
const Selector* FindSelector(std::string_view name) { return Find(Selectors(), name); }
std::string PolicyNames() { return Names(Policies()); }
std::string SelectorNames() { return Names(Selectors()); }

std::string_view PolicyOf(std::string_view policy, std::string_view quality) {
  return ParseQuality(quality).value_or(Quality()).strict ? kExact : policy;
}

std::string_view BestUnder(double agreement, std::string_view best) {
  return agreement > 0 && !best.empty() ? kSparseX : best;
}

std::string_view ResolvePolicy(std::string_view policy, bool has_segments, std::string_view best) {
  if (!IsAuto(policy)) return policy;
  return has_segments ? best : kExact;
}

std::string_view ResolveSelector(std::string_view selector, bool has_head_classes) {
  if (!IsAuto(selector)) return selector;
  return has_head_classes ? kHeadClassSelector : kDense;
}

}  // namespace spl::methods
