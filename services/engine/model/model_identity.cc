#include "services/engine/model/model_identity.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <xxhash.h>

#include <algorithm>
#include <string>

#include "kernels/backend/backend.h"  // kPageTokens
#include "services/base/ids.h"

namespace spl::engine {
namespace {

// The parts of the configuration that change what the model computes, spelled unambiguously.
std::string ConfigIdentity(const ModelConfig& c) {
  std::string identity = fmt::format("{}|{}|{}|{}|{}|{}|{}|{}|{:.9g}|{}|{}|rope:{}:{:.17g}:{:.17g}:{:.17g}:{:.17g}:{}",
                                     c.architecture, c.hidden_size, c.intermediate_size, c.num_layers, c.num_qo_heads,
                                     c.num_kv_heads, c.head_dim, c.vocab_size, c.rms_norm_eps, c.tie_word_embeddings,
                                     c.attention_bias, static_cast<int>(c.rope.scaling), c.rope.theta, c.rope.factor,
                                     c.rope.low_freq_factor, c.rope.high_freq_factor, c.rope.original_max_positions);
  // Fields that were added later are spelled only if they are used, so that stored chunks of older models keep their
  // keys.
  if (c.rope.scaling == RopeScaling::kYarn)
    identity += fmt::format("|yarn:{:.17g}:{:.17g}:{}:{:.17g}", c.rope.beta_fast, c.rope.beta_slow, c.rope.truncate,
                            c.rope.attention_factor);
  if (c.qk_norm) identity += "|qk_norm";
  if (!c.sliding_windows.empty()) identity += fmt::format("|windows:{}", fmt::join(c.sliding_windows, ","));
  if (c.moe.num_experts > 0)
    identity +=
        fmt::format("|moe:{}:{}:{}:{}:{}:{}", c.moe.num_experts, c.moe.num_experts_per_token, c.moe.intermediate_size,
                    c.moe.renormalize, c.moe.sparse_step, fmt::join(c.moe.dense_layers, ","));
  if (c.quantization.is_int4())
    identity += fmt::format("|int4:{}:{}:{}:{}", static_cast<int>(c.quantization.int4), c.quantization.group,
                            c.quantization.zero_points, c.quantization.zeros_less_one);
  else if (c.quantization.quantized())
    identity += fmt::format("|quantization:{}:{}", c.quantization.scale_suffix, c.quantization.blocks());
  return identity;
}

}  // namespace

// Weight files are gigabytes, and trusted: a 128-bit XXH3 of each (10 GB/s) is folded into the SHA-256.
chunk::Digest FolderFingerprint(const ModelConfig& config, const Checkpoint& checkpoint) {
  std::string identity = "splice-model-1|" + ConfigIdentity(config);
  for (const auto& file : checkpoint.files()) {
    const XXH128_hash_t hash = XXH3_128bits(file->bytes().data(), file->bytes().size());
    identity += fmt::format("|{}:{:016x}{:016x}", file->bytes().size(), hash.high64, hash.low64);
  }
  return chunk::Sha256(identity);
}

chunk::Digest RandomFingerprint(const RandomModel& random) {
  return chunk::Sha256(fmt::format("splice-random-model-1|{}|{}|{}", ConfigIdentity(random.config), random.seed,
                                   kernels::DTypeName(random.config.dtype)));
}

namespace {

chunk::Digest Derived(std::string_view domain, const chunk::Digest& from) {
  return chunk::Sha256(std::string(domain) + std::string(reinterpret_cast<const char*>(from.data()), from.size()));
}

}  // namespace

chunk::Digest QuantizedFingerprint(const chunk::Digest& of_weights, QuantizeTo to) {
  if (to == QuantizeTo::kNone) return of_weights;
  return Derived(to == QuantizeTo::kInt4 ? "splice-quantized-int4-1|" : "splice-quantized-fp8-1|", of_weights);
}

chunk::Digest KvFingerprint(const chunk::Digest& of_model, kernels::DType kv_dtype) {
  return kv_dtype == kernels::DType::kE4M3 ? Derived("splice-kv-fp8-1|", of_model) : of_model;
}

chunk::Digest LayoutDigest(const ModelConfig& c, kernels::DType kv_dtype) {
  return chunk::Sha256(fmt::format("splice-layout-1|{}|{}|{}|{}|{}", c.num_layers, c.num_kv_heads, c.head_dim,
                                   kernels::DTypeName(kv_dtype), kernels::kPageTokens));
}

chunk::Digest ReadModelFingerprint(JsonObjectReader<nlohmann::json>& fields) {
  chunk::Digest fingerprint{};
  const std::string hex = fields.StringOr("model_fingerprint", "");
  if (hex.empty()) return fingerprint;
  const auto bytes = HexDecode(hex);
  if (!bytes.ok() || bytes->size() != fingerprint.size())
    fields.Fail("model_fingerprint", "must be 64 hexadecimal digits");
  else
    std::copy(bytes->begin(), bytes->end(), fingerprint.begin());
  return fingerprint;
}

}  // namespace spl::engine
