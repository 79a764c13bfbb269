// Which part of a model one rank of a tensor-parallel worker has (Shoeybi et al., "Megatron-LM", 2019, section 3):
// attention by heads, feed-forward (and every expert's) by its inner width, the head of the vocabulary by its rows.
// What is left over is replicated: embedding, norms, the experts' router.
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

  // Of something that num_ranks divides: heads, their rows, inner widths.
  Range PartOf(int64_t total) const { return {total * rank / num_ranks, total * (rank + 1) / num_ranks}; }
  // Of the vocabulary's rows, which need not divide: in whole eights, so that matrix kernels find them aligned.
  Range VocabPart(int64_t vocab_size) const;
  // What the layers of this rank look like: its numbers of heads and inner widths, everything else the model's.
  ModelConfig LocalConfig(const ModelConfig& config) const;
};

// InvalidArgument says which number of the model `num_ranks` (1, 2, 4 or 8) does not divide.
absl::Status ValidateNumRanks(const ModelConfig& config, int num_ranks);

}  // namespace spl::engine
