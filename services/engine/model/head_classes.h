// Which KV heads need the whole context and which get by with a window and the first tokens (RedKnot 3.1, DuoAttention
// 2; docs/methods/redknot.md, "Head classes"). The file head_classes.json beside a model; docs/head-classes.md
// describes it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/common/visibility.h"
#include "services/chunk/chunk.h"
#include "services/engine/model/model_config.h"

namespace spl::engine {

// A local head at position i sees [0, sinks) and [i - window + 1, i]: `window` counts the token itself.
struct HeadClass {
  bool is_global = true;
  int32_t window = 0;  // of a local head, >= 1
  int32_t sinks = 0;   // of a local head, >= 0
  bool operator==(const HeadClass&) const = default;

  kernels::HeadVisibility visibility() const;
  // Tokens that a sequence of `num_tokens` keeps: all, or sinks and window.
  int64_t kept_tokens(int64_t num_tokens) const;
};

// What profiling found, [layer][kv_head] flattened; empty in a map that was made by hand or imported.
struct HeadProfile {
  int64_t num_tokens = 0;            // of calibration text
  std::vector<float> edge_mass;      // attention outside of sinks and window, mean over rows, largest of the group
  std::vector<float> edge_mass_q99;  // its 99th percentile over probe windows: what restoring compares with
  std::vector<float> prefix_shift;   // how much other text in front turns what the head reads
  // Of the rows that answer, where texts end with an answer: the mean of a text, its 95th percentile over texts. Empty:
  // no text had one.
  std::vector<float> answer_mass;
  bool empty() const { return edge_mass.empty(); }
};

// What the mode `splice` reached with a map, beside `exact`, on some evaluation set.
struct HeadQuality {
  std::string data;  // what was asked
  int64_t samples = 0;
  int64_t exact = 0, splice = 0;  // right answers
  // Measured, and at most two points behind.
  bool within_contract() const { return samples > 0 && 50 * (exact - splice) <= samples; }
};

// Which rows a model can spare feed-forward, as far as a request does not say (RedKnot 3.3: the schedule is the
// model's). Small models cannot spare any: their map says mass 1.
struct FfnSchedule {
  double mass = 0.5;          // share of importance whose rows run; 1: all rows
  int32_t dense_layers = -1;  // first layers where all rows run; -1: a quarter of the model
  int32_t recent = 128;       // last tokens of the prompt that always run
  int32_t deep_layer = -1;    // from this layer on deep_mass; -1: never
  double deep_mass = 0.5;
  bool operator==(const FfnSchedule&) const = default;
};

// By what a profile ranks heads.
enum class HeadRanking : uint8_t {
  // answer_mass, as DuoAttention looks at answers only; of texts without answers edge_mass_q99: what a window would
  // lose
  // where it matters.
  kEdge,
  // max(prefix_shift, edge_mass), means over all rows: RedKnot's. A head whose copies go stale behind other text may
  // need
  // no more than a window, and a mean over all rows hides the few in which a head looks far.
  kCombined,
};

// How a profile becomes classes.
struct HeadPreset {
  std::string name;
  double global_share = 0.5;
  int32_t window = 256;
  int32_t sinks = 64;
  int32_t dense_prefix_layers = 0;  // every head of the first layers is global; they count to the share
  HeadRanking ranking = HeadRanking::kEdge;
};
// "safe", "mid", "paper". InvalidArgument for another name, with these.
absl::StatusOr<HeadPreset> FindHeadPreset(std::string_view name);
std::span<const HeadPreset> HeadPresets();

// Immutable; any thread.
class HeadClassMap {
 public:
  // REQUIRES: classes.size() == num_layers * num_kv_heads, both positive; classes within kHeadWindowMax.
  HeadClassMap(int32_t num_layers, int32_t num_kv_heads, std::vector<HeadClass> classes);

  // The round(share * heads) heads that the ranking puts first are global, ties to the lower layer
  // and head; so are those of the dense prefix. REQUIRES: a profile of this shape.
  static HeadClassMap FromProfile(int32_t num_layers, int32_t num_kv_heads, HeadProfile profile,
                                  const HeadPreset& preset);

  // InvalidArgument: "SOURCE: 'FIELD' WHY". `source` is for the message.
  static absl::StatusOr<HeadClassMap> Parse(const std::string& json, const std::string& source);
  static absl::StatusOr<HeadClassMap> Load(const std::string& path);  // NotFound too
  std::string ToJson() const;

  // FailedPrecondition when it belongs to a model of another shape or with other weights (a map without a fingerprint,
  // imported or made by hand, is held against the shape alone).
  absl::Status CheckModel(int32_t num_layers, int32_t num_kv_heads, const chunk::Digest& model_fingerprint) const;

  // Global heads spread evenly over the model, as many as the preset says: for measurements with random weights, which
  // there is nothing to profile in.
  static HeadClassMap Spread(int32_t num_layers, int32_t num_kv_heads, const HeadPreset& preset);

  int32_t num_layers() const { return num_layers_; }
  int32_t num_kv_heads() const { return num_kv_heads_; }
  const HeadClass& at(int32_t layer, int32_t kv_head) const {
    return classes_[static_cast<size_t>(layer) * static_cast<size_t>(num_kv_heads_) + static_cast<size_t>(kv_head)];
  }
  // As used when decoding, and so by what is sent and kept: as at(), but the first layers see everything (SparCas 3.2;
  // docs/methods/redknot.md, "Head classes").
  HeadClass served(int32_t layer, int32_t kv_head) const {
    return layer < kDenseDecodeLayers ? HeadClass{} : at(layer, kv_head);
  }
  static constexpr int32_t kDenseDecodeLayers = 2;
  const std::string& preset() const { return preset_; }
  const HeadProfile& profile() const { return profile_; }
  const FfnSchedule& ffn() const { return ffn_; }
  void set_ffn(const FfnSchedule& ffn) { ffn_ = ffn; }
  const HeadQuality& quality() const { return quality_; }  // without samples: not measured
  void set_quality(const HeadQuality& quality) { quality_ = quality; }
  double global_share() const;
  // Tokens that all heads keep of `num_tokens`, over those of a dense cache (docs/methods/redknot.md, "What is sent",
  // without page rounding).
  double kept_share(int64_t num_tokens) const;
  // SHA-256 over the classes, windows and sinks: equal digests mean that both sides leave out the same.
  const chunk::Digest& digest() const { return digest_; }

  void set_preset(std::string name) { preset_ = std::move(name); }
  void set_model_fingerprint(const chunk::Digest& fingerprint) { model_fingerprint_ = fingerprint; }
  const chunk::Digest& model_fingerprint() const { return model_fingerprint_; }  // all zero: unknown

 private:
  int32_t num_layers_ = 0, num_kv_heads_ = 0;
  std::vector<HeadClass> classes_;
  std::string preset_;
  HeadProfile profile_;
  FfnSchedule ffn_;
  HeadQuality quality_;
  chunk::Digest model_fingerprint_{};  // all zero: unknown
  chunk::Digest digest_{};
};

// What a head of this class sees where the model itself lets it see `own`: of two windows the shorter one counts, and
// of a model with a window of its own there are no sinks beyond that.
kernels::HeadVisibility ClassVisibility(const HeadClass& head, const kernels::HeadVisibility& own);
// What the rows of a head see in a layer where classes count: its class, inside of what the model itself lets it see.
kernels::HeadVisibility ServedVisibility(const ModelConfig& config, const HeadClassMap& map, int32_t layer,
                                         int32_t kv_head);

inline constexpr int32_t kHeadWindowMax = 1 << 20;
// Of the local heads, the share that one request may have restored (docs/methods/redknot.md, "Restore").
inline constexpr double kRestoreShareMax = 0.1;

}  // namespace spl::engine
