// Measures which KV heads need the whole context, by the two measures of RedKnot 3.1 (docs/methods/redknot.md, "Head
// classes"):
//
//   edge_mass    = mean over rows i of (1 - Σ_{j < sinks or i - window < j <= i} A[i, j])
//   prefix_shift = 1 - cos(what the head reads for a chunk alone, ... behind other text), mean over rows, in [0, 1]
//
// A KV head gets the largest value of its query heads. edge_mass_q99 is the 99th percentile of the edge mass of 64
// rows: the value that a prompt's probe rows will show in the worst of a hundred cases (2.6).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "services/engine/cache/kv_memory.h"
#include "services/engine/execution/executor.h"
#include "services/engine/execution/observers/attention_profile.h"
#include "services/engine/model/head_classes.h"

namespace spl::engine {

struct HeadProfilerOptions {
  int32_t window = 256;
  int32_t sinks = 64;
  int32_t chunk_tokens = 512;  // length of the chunk whose prefix_shift is measured
  int32_t max_text_tokens = 2048;
  ExecutorOptions executor;
};

// One thread at a time. Memory: the KV of one text, and the head outputs of one chunk (layers · query heads · head_dim
// · chunk_tokens floats).
class HeadProfiler {
 public:
  // Unimplemented for a model on several ranks.
  static absl::StatusOr<std::unique_ptr<HeadProfiler>> Create(std::shared_ptr<const Model> model,
                                                              const HeadProfilerOptions& options);

  // Measures one text, and its last chunk alone and behind the start of `other`. Cost: three prefills. The last
  // num_answer_tokens of `text` are an answer: answer_mass is measured over the rows that choose them. InvalidArgument:
  // `text` or `other` has fewer than 2 · chunk_tokens or more than max_text_tokens; the answer is not shorter than a
  // chunk.
  absl::Status Add(std::span<const int32_t> text, std::span<const int32_t> other, int32_t num_answer_tokens = 0);

  int64_t num_texts() const { return num_texts_; }
  // REQUIRES: num_texts() > 0.
  HeadProfile Result() const;

 private:
  HeadProfiler() = default;
  // [layer] → [chunk rows, query heads, head_dim]
  using ChunkOutputs = std::vector<std::vector<float>>;
  // Runs the tokens. Adds the edge mass of each row if `measure_edge`, and passes the head outputs of the last chunk,
  // layer by layer, to `on_chunk`.
  absl::Status Run(std::span<const int32_t> tokens, bool measure_edge, int32_t num_answer_tokens,
                   const std::function<void(int32_t layer, std::span<const float> outputs)>& on_chunk);
  void AddEdge(const AttentionObservation& seen, int32_t num_answer_tokens);
  void AddShift(int32_t layer, std::span<const float> alone, std::span<const float> prefixed);

  std::shared_ptr<const Model> model_;
  HeadProfilerOptions options_;
  std::unique_ptr<KvMemory> memory_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<Executor> executor_;

  int64_t num_texts_ = 0, num_rows_ = 0, num_shift_rows_ = 0;
  std::vector<double> edge_sum_, shift_sum_;         // [layer][query head]
  std::vector<std::vector<float>> edge_of_rows_;     // [layer][query head] → means of 64 rows
  std::vector<std::vector<float>> edge_of_answers_;  // the same → means of each text's answer
};

}  // namespace spl::engine
