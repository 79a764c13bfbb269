// Runs a model's layers over rows of one or more sequences, one layer after the other. Written once against
// kernels::Backend; knows no method: what a row attends to comes from policies and selectors.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/engine/cache/sequence_kv.h"
#include "services/engine/model/model.h"
#include "services/engine/recovery/recovery_policy.h"
#include "services/engine/selection/token_selector.h"

namespace spl::engine {

struct ExecutorOptions {
  int32_t num_threads = 0;  // 0: one per core
  int32_t max_rows = 512;   // of one forward pass; workspace grows linearly with it
  kernels::CpuIsa isa = kernels::DetectCpuIsa();
};

// Tokens of one prompt slice: positions [first_position, first_position + tokens.size()), whose pages are reserved.
struct PrefillSlice {
  std::span<const int32_t> tokens;
  int64_t first_position = 0;
  const SequenceKv* kv = nullptr;
  RecoveryPolicy* policy = nullptr;
};

// One token of one running sequence, at position kv->num_tokens(), whose page is reserved.
struct DecodeRow {
  int32_t token = 0;
  const SequenceKv* kv = nullptr;
  TokenSelector* selector = nullptr;
};

// Owns the workspace; one engine thread uses it. The caller updates num_tokens of each sequence after a pass.
// Rows do not influence each other: a sequence's results are the same alone and in a batch (attention.h, gemm.h).
class Executor {
 public:
  static absl::StatusOr<std::unique_ptr<Executor>> Create(std::shared_ptr<const Model> model,
                                                          const kernels::KvPoolView& pool,
                                                          const ExecutorOptions& options);

  // Called when K and V of the pass's rows are final in the pages of `layer`, before the layer's attention runs. False
  // ends the pass early with Cancelled.
  using OnLayer = std::function<bool(int32_t layer)>;

  // ResourceExhausted when the slices together have more than max_rows tokens.
  absl::Status Prefill(std::span<const PrefillSlice> slices, const OnLayer& on_layer = nullptr);
  absl::Status Decode(std::span<const DecodeRow> rows);

  // Logits of rows of the last pass (row 0 is the first token of the first slice). f32 [rows.size(), vocab]; valid
  // until the next call. At most max_rows rows.
  absl::StatusOr<std::span<float>> Logits(std::span<const int32_t> rows);

  const Model& model() const { return *model_; }
  int32_t max_rows() const { return options_.max_rows; }
  const kernels::KernelContext& context() const { return context_; }

 private:
  Executor(std::shared_ptr<const Model> model, const kernels::KvPoolView& pool, const ExecutorOptions& options);
  absl::Status AllocateWorkspace();
  // What a pass does, whoever asks for it: embeds, then every layer with `attend` in the middle.
  absl::Status Run(std::span<const int32_t> tokens, const OnLayer& on_layer,
                   const std::function<absl::Status(int32_t layer)>& attend);
  absl::Status WriteKv(int32_t layer);
  absl::Status FeedForward(const LayerWeights& weights);
  absl::Status Normalize(const float* delta, const kernels::Buffer& weight);
  kernels::AttentionShape attention_shape() const;

  // A sequence's rows in the current pass.
  struct RowSpan {
    int32_t begin = 0, end = 0;
    const SequenceKv* kv = nullptr;
  };

  std::shared_ptr<const Model> model_;
  const kernels::KvPoolView pool_;
  const ExecutorOptions options_;
  std::unique_ptr<kernels::ThreadPool> threads_;
  kernels::KernelContext context_;

  int32_t num_rows_ = 0;
  std::vector<RowSpan> spans_;
  std::vector<int32_t> tokens_, positions_;
  // Scratch of WriteKv and attention, rebuilt per layer without allocating once warm.
  std::vector<std::span<const int32_t>> table_views_;
  std::vector<kernels::RopeSequence> rope_sequences_;
  std::vector<kernels::HeadStreamView> stream_views_;
  std::vector<kernels::PrefillSequence> prefill_sequences_;

  struct Workspace {
    std::unique_ptr<kernels::Buffer> residual;        // [max_rows, hidden]
    std::unique_ptr<kernels::Buffer> delta;           // [max_rows, hidden]: what the residual still lacks
    std::unique_ptr<kernels::Buffer> normed;          // [max_rows, hidden]
    std::unique_ptr<kernels::Buffer> qkv;             // [max_rows, (Hq + 2 Hk) d]
    std::unique_ptr<kernels::Buffer> attention;       // [max_rows, Hq d]
    std::unique_ptr<kernels::Buffer> gate_up;         // [max_rows, 2 ffn]
    std::unique_ptr<kernels::Buffer> activated;       // [max_rows, ffn]
    std::unique_ptr<kernels::Buffer> gathered;        // [max_rows, hidden]
    std::unique_ptr<kernels::Buffer> gathered_delta;  // [max_rows, hidden]
    std::unique_ptr<kernels::Buffer> logits;          // [max_rows, vocab], grown on demand
  } ws_;
};

}  // namespace spl::engine
