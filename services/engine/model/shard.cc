#include "services/engine/model/shard.h"

#include "services/base/status.h"

namespace spl::engine {
namespace {

constexpr int64_t kVocabStep = 8;

}  // namespace

Range Shard::VocabPart(int64_t vocab_size) const {
  const auto border = [&](int64_t r) {
    return r == num_ranks ? vocab_size : vocab_size * r / num_ranks / kVocabStep * kVocabStep;
  };
  return {border(rank), border(rank + 1)};
}

ModelConfig Shard::LocalConfig(const ModelConfig& config) const {
  ModelConfig local = config;
  local.num_qo_heads /= num_ranks;
  local.num_kv_heads /= num_ranks;
  local.intermediate_size /= num_ranks;
  local.moe.intermediate_size /= num_ranks;
  return local;
}

absl::Status ValidateNumRanks(const ModelConfig& config, int num_ranks) {
  if (num_ranks != 1 && num_ranks != 2 && num_ranks != 4 && num_ranks != 8)
    return InvalidArgument("--tp is {}, not 1, 2, 4 or 8", num_ranks);
  const auto divides = [&](const char* what, int32_t count) -> absl::Status {
    if (count % num_ranks == 0) return absl::OkStatus();
    return InvalidArgument("--tp {}: model '{}' has {} = {}, which {} does not divide", num_ranks, config.name, what,
                           count, num_ranks);
  };
  SPLICE_RETURN_IF_ERROR(divides("num_key_value_heads", config.num_kv_heads));
  SPLICE_RETURN_IF_ERROR(divides("num_attention_heads", config.num_qo_heads));
  SPLICE_RETURN_IF_ERROR(divides("intermediate_size", config.intermediate_size));
  SPLICE_RETURN_IF_ERROR(divides("moe_intermediate_size", config.moe.intermediate_size));
  if (config.vocab_size < kVocabStep * num_ranks)
    return InvalidArgument("--tp {}: model '{}' has vocab_size = {}, at least {} are needed", num_ranks, config.name,
                           config.vocab_size, kVocabStep * num_ranks);
  return absl::OkStatus();
}

}  // namespace spl::engine
