#include "services/engine/execution/workspace_bytes.h"

#include <algorithm>

#include "kernels/common/kv_pool.h"
#include "kernels/quantize/quantize_rows.h"

namespace spl::engine {
namespace {

// Products' workspace, recordings, staging, and what the libraries load when they first run.
constexpr uint64_t kLibraryBytes = 256ull << 20;
constexpr uint64_t kWord = 4;  // f32 and int32; activations may be narrower

}  // namespace

uint64_t WorkspaceBytes(const Model& model, const ExecutorOptions& options) {
  const ModelShard& shard = model.rank(0);
  const ModelConfig& c = shard.config();
  const auto size = [](int64_t value) { return static_cast<uint64_t>(value); };
  const uint64_t rows = size(options.max_rows);
  const uint64_t sequences = size(std::min(options.max_sequences, options.max_rows));
  // Residual, delta, normed, gathered and its delta; qkv, q, attention and its copy for observers; gate, up, activated.
  uint64_t row = kWord * (5 * size(c.hidden_size) + size(c.q_size() + 2 * c.kv_size()) + 3 * size(c.q_size()) +
                          3 * size(c.intermediate_size) + 2 * size(c.num_qo_heads) + 16);
  // Scales of a row in e4m3.
  row += kWord * (size(std::max<int64_t>({c.hidden_size, c.q_size(), c.intermediate_size}) / kernels::kE4M3Group) + 1);
  if (c.moe.num_experts > 0) {
    const uint64_t place = kWord * (3 * size(c.moe.intermediate_size) + size(c.hidden_size) + 4);
    row += kWord * size(c.moe.num_experts) + size(c.moe.num_experts_per_token) * place;
  }
  const uint64_t logits = kWord * sequences * size(shard.vocab().size());
  // Twice: sequences that choose tokens have tables of their own.
  const uint64_t tables =
      2 * kWord * sequences * size(c.num_layers) * size(c.num_kv_heads) * size(PagesFor(c.max_positions));
  // Steps have a row for each sequence and read codes as they are.
  const bool widens = model.kv_dtype() == kernels::DType::kE4M3 && !shard.backend().host_memory() &&
                      options.max_rows > options.max_sequences;
  const uint64_t wide = !widens ? 0
                                : size(PagesFor(c.max_positions)) * size(c.num_kv_heads) *
                                      kernels::KvPageBytes(kernels::DType::kBF16, c.head_dim) * 9 / 8;
  return rows * row + logits + tables + wide + kLibraryBytes;
}

}  // namespace spl::engine
