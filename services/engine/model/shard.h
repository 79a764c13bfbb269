// The part of a model that one rank of a tensor-parallel worker has (Shoeybi et al., "Megatron-LM", 2019, section 3).
// Attention is split by heads, feed-forward (also that of each expert) by its inner width, the LM head by rows of the
// vocabulary. Embedding, norms and the experts' router are replicated.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "services/engine/model/model_config.h"

namespace spl::engine {

// [begin, end)
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

struct Shard {
  int rank = 0;
  int num_ranks = 1;

  // This rank's part of `total`, which num_ranks must divide: heads, their rows, inner widths.
  Range PartOf(int64_t total) const { return {total * rank / num_ranks, total * (rank + 1) / num_ranks}; }
  // This rank's rows of the vocabulary, whose size num_ranks need not divide. Parts are multiples of eight rows, so
  // that they are aligned for matrix kernels.
  Range VocabPart(int64_t vocab_size) const;
  // Configuration of this rank's layers: its own numbers of heads and inner widths, everything else from the model.
  ModelConfig LocalConfig(const ModelConfig& config) const;
};

// InvalidArgument names the number of the model that `num_ranks` (1, 2, 4 or 8) does not divide.
absl::Status ValidateNumRanks(const ModelConfig& config, int num_ranks);

}  // namespace spl::engine
