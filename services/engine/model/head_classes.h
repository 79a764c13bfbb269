// Head classes: which KV heads need the whole context (global), and which need only the first tokens (sinks) and a
// window (local). Source: RedKnot 3.1, DuoAttention 2; docs/methods/redknot.md, "Head classes". Stored as
// head_classes.json beside a model; docs/head-classes.md describes the file.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/common/visibility.h"
#include "services/chunk/chunk.h"
#include "services/engine/model/model_config.h"

namespace spl::engine {

// A local head at position i sees [0, sinks) and [i - window + 1, i]: `window` counts the token itself.
struct HeadClass {
  bool is_global = true;
  int32_t window = 0;  // local head: >= 1
  int32_t sinks = 0;   // local head: >= 0
  bool operator==(const HeadClass&) const = default;

  kernels::HeadVisibility visibility() const;
  // Number of tokens that this head keeps of a sequence of `num_tokens`: all, or sinks and window.
  int64_t kept_tokens(int64_t num_tokens) const;
};

// Results of profiling (profile/head_profiler.h). Each vector is [layer][kv_head] flattened; empty in a map that was
// made by hand or imported.
struct HeadProfile {
  int64_t num_tokens = 0;            // length of the calibration text
  std::vector<float> edge_mass;      // attention outside of sinks and window: mean over rows, largest query head
  std::vector<float> edge_mass_q99;  // its 99th percentile over probe windows, which restoring compares with
  std::vector<float> prefix_shift;   // how far the head's output turns if other text stands in front
  // The edge mass of the rows that choose an answer's tokens: mean over a text, 95th percentile over texts. Empty: no
  // text ended with an answer.
  std::vector<float> answer_mass;
  bool empty() const { return edge_mass.empty(); }
};

// Quality of the mode `splice` with a map, compared with `exact`, on some evaluation set.
struct HeadQuality {
  std::string data;  // name of the evaluation set
  int64_t samples = 0;
  int64_t exact = 0, splice = 0;  // right answers
  // Tokens of the longest prompts that were asked, of which it holds; 0: not said, any. The longer a prompt, the more of
  // it is outside of a window.
  int64_t longest = 0;
  // True if measured, and at most two percentage points of answers behind.
  bool within_contract() const { return samples > 0 && 50 * (exact - splice) <= samples; }
};

// Rows that a model runs feed-forward for; a request may override it (RedKnot 3.3: the schedule is the model's). Small
// models need all rows: their map says mass 1.
struct FfnSchedule {
  double mass = 0.5;          // rows run until their share of the importance reaches this; 1: all rows
  int32_t dense_layers = -1;  // first layers, in which all rows run; -1: a quarter of the model
  int32_t recent = 128;       // last tokens of the prompt that always run
  int32_t deep_layer = -1;    // first layer that uses deep_mass; -1: none
  double deep_mass = 0.5;
  bool operator==(const FfnSchedule&) const = default;
};

// Measure by which a profile ranks heads.
enum class HeadRanking : uint8_t {
  // answer_mass, because DuoAttention looks at answers only; for texts without answers edge_mass_q99, which is what a
  // window would lose where it matters.
  kEdge,
  // max(prefix_shift, edge_mass), means over all rows, as in RedKnot. Two weaknesses: a head whose copies go stale
  // behind other text may still need no more than a window, and a mean over all rows hides the few in which a head
  // looks far.
  kCombined,
};

// Rules by which a profile becomes classes.
struct HeadPreset {
  std::string name;
  double global_share = 0.5;
  int32_t window = 256;
  int32_t sinks = 64;
  int32_t dense_prefix_layers = 0;  // first layers whose heads are all global; these count towards the share
  HeadRanking ranking = HeadRanking::kEdge;
};
// `name`: "safe", "mid" or "paper". InvalidArgument for another name; the message lists these.
absl::StatusOr<HeadPreset> FindHeadPreset(std::string_view name);
std::span<const HeadPreset> HeadPresets();

// Immutable; any thread.
class HeadClassMap {
 public:
  // REQUIRES: classes.size() == num_layers * num_kv_heads, both positive; classes within kHeadWindowMax.
  HeadClassMap(int32_t num_layers, int32_t num_kv_heads, std::vector<HeadClass> classes);

  // The round(share * heads) heads that the ranking puts first become global, ties to the lower layer and head, and so
  // do the heads of the dense prefix. REQUIRES: a profile of this shape.
  static HeadClassMap FromProfile(int32_t num_layers, int32_t num_kv_heads, HeadProfile profile,
                                  const HeadPreset& preset);

  // InvalidArgument: "SOURCE: 'FIELD' WHY". `source` is for the message.
  static absl::StatusOr<HeadClassMap> Parse(const std::string& json, const std::string& source);
  static absl::StatusOr<HeadClassMap> Load(const std::string& path);  // errors of Parse, and NotFound
  std::string ToJson() const;

  // FailedPrecondition: the map belongs to a model of another shape or with other weights. A map without a fingerprint
  // (imported or made by hand) is checked against the shape alone.
  absl::Status CheckModel(int32_t num_layers, int32_t num_kv_heads, const chunk::Digest& model_fingerprint) const;

  // As many global heads as the preset says, spread evenly over the model. For measurements with random weights, for
  // which a profile means nothing.
  static HeadClassMap Spread(int32_t num_layers, int32_t num_kv_heads, const HeadPreset& preset);

  int32_t num_layers() const { return num_layers_; }
  int32_t num_kv_heads() const { return num_kv_heads_; }
  const HeadClass& at(int32_t layer, int32_t kv_head) const {
    return classes_[static_cast<size_t>(layer) * static_cast<size_t>(num_kv_heads_) + static_cast<size_t>(kv_head)];
  }
  // The class that decoding uses, and therefore also what is sent and kept: at(), except that the first dense_layers()
  // layers see everything (SparCas 3.2; docs/methods/redknot.md, "Head classes").
  HeadClass served(int32_t layer, int32_t kv_head) const {
    return layer < dense_layers_ ? HeadClass{} : at(layer, kv_head);
  }
  // Layers that are dense unless the map says otherwise ("dense_layers"), as a learned one may.
  static constexpr int32_t kDenseDecodeLayers = 2;
  int32_t dense_layers() const { return dense_layers_; }
  void set_dense_layers(int32_t layers);  // REQUIRES: 0 <= layers <= num_layers()
  // The class by which the rows of a prompt see where a method computes all of them (redknot, splice+, loopserve):
  // served(), except for local heads of `whole_in_prefill`, which see everything there. Documents need more heads whole
  // than the question and the answer, because they carry what one says into another.
  HeadClass in_prefill(int32_t layer, int32_t kv_head) const {
    const size_t i = static_cast<size_t>(layer) * static_cast<size_t>(num_kv_heads_) + static_cast<size_t>(kv_head);
    return !whole_in_prefill_.empty() && whole_in_prefill_[i] ? HeadClass{} : served(layer, kv_head);
  }
  // Local heads that see everything in prefill: [layer][kv_head] flattened, or empty: none. The KV that is kept, and
  // the digest, do not depend on it.
  void set_whole_in_prefill(std::vector<bool> heads) { whole_in_prefill_ = std::move(heads); }
  const std::string& preset() const { return preset_; }
  const HeadProfile& profile() const { return profile_; }
  const FfnSchedule& ffn() const { return ffn_; }
  void set_ffn(const FfnSchedule& ffn) { ffn_ = ffn; }
  const HeadQuality& quality() const { return quality_; }  // samples 0: not measured
  void set_quality(const HeadQuality& quality) { quality_ = quality; }
  double global_share() const;
  // Tokens that all heads keep of a sequence of `num_tokens`, divided by those of a dense cache; not rounded to pages
  // (docs/methods/redknot.md, "What is sent").
  double kept_share(int64_t num_tokens) const;
  // SHA-256 over classes, windows and sinks, and dense_layers() if it is not the default. Equal digests prove that two
  // workers leave out the same tokens.
  const chunk::Digest& digest() const { return digest_; }

  void set_preset(std::string name) { preset_ = std::move(name); }
  void set_model_fingerprint(const chunk::Digest& fingerprint) { model_fingerprint_ = fingerprint; }
  const chunk::Digest& model_fingerprint() const { return model_fingerprint_; }  // all zero: unknown

 private:
  int32_t num_layers_ = 0, num_kv_heads_ = 0;
  int32_t dense_layers_ = kDenseDecodeLayers;
  std::vector<HeadClass> classes_;
  std::vector<bool> whole_in_prefill_;
  std::string preset_;
  HeadProfile profile_;
  FfnSchedule ffn_;
  HeadQuality quality_;
  chunk::Digest model_fingerprint_{};  // all zero: unknown
  chunk::Digest digest_{};
};

// Visibility of a head of this class in a layer of visibility `own`. The shorter of two windows counts. In a layer with
// a sliding window of its own, no sinks are visible outside of it.
kernels::HeadVisibility ClassVisibility(const HeadClass& head, const kernels::HeadVisibility& own);
// Visibility of a head in a layer where classes count: ClassVisibility of its served class and the layer's own
// visibility.
kernels::HeadVisibility ServedVisibility(const ModelConfig& config, const HeadClassMap& map, int32_t layer,
                                         int32_t kv_head);
// The same of the class that counts where a method computes all rows of a prompt (HeadClassMap::in_prefill).
kernels::HeadVisibility PrefillVisibility(const ModelConfig& config, const HeadClassMap& map, int32_t layer,
                                          int32_t kv_head);

inline constexpr int32_t kHeadWindowMax = 1 << 20;
// Most of the local heads that one request may have restored, as a share (docs/methods/redknot.md, "Restore").
inline constexpr double kRestoreShareMax = 0.1;

}  // namespace spl::engine
