#include <openssl/evp.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "services/base/check.h"
#include "services/base/ids.h"
#include "services/chunk/chunk.h"

namespace spl::chunk {
namespace {

constexpr std::string_view kDomain = "splice.chunk.key.v1";
constexpr std::string_view kContextDomain = "splice.chunk.context.v1";

// Every field is preceded by its length, so that no two lists of fields give the same bytes.
class KeyInput {
 public:
  void Append(const void* data, size_t size) {
    const uint64_t length = size;
    for (int i = 0; i < 8; ++i) bytes_.push_back(static_cast<uint8_t>(length >> (8 * i)));
    const auto* const from = static_cast<const uint8_t*>(data);
    bytes_.insert(bytes_.end(), from, from + size);
  }

  void AppendTokens(std::span<const int32_t> tokens) {
    std::vector<uint8_t> encoded;
    encoded.reserve(tokens.size() * 4);
    for (const int32_t token : tokens) {
      for (int i = 0; i < 4; ++i) encoded.push_back(static_cast<uint8_t>(static_cast<uint32_t>(token) >> (8 * i)));
    }
    Append(encoded.data(), encoded.size());
  }

  ChunkKey Hash() const { return {Sha256({reinterpret_cast<const char*>(bytes_.data()), bytes_.size()})}; }

 private:
  std::vector<uint8_t> bytes_;
};

}  // namespace

Digest Sha256(std::string_view bytes) {
  Digest digest{};
  unsigned size = 0;
  const int done = EVP_Digest(bytes.data(), bytes.size(), digest.data(), &size, EVP_sha256(), nullptr);
  SPLICE_CHECK(done == 1 && size == digest.size(), "SHA-256 is not available");
  return digest;
}

std::string ChunkKey::ToHex() const { return HexEncode(bytes); }

size_t ChunkKeyHash::operator()(const ChunkKey& key) const {
  size_t hash;
  std::memcpy(&hash, key.bytes.data(), sizeof(hash));
  return hash;
}

ChunkKey MakeChunkKey(ChainKind kind, const Digest& model_fingerprint, const Digest& namespace_key,
                      const ChunkKey* previous, std::span<const int32_t> tokens) {
  SPLICE_CHECK(!tokens.empty() && tokens.size() <= kChunkTokens, "a chunk has 1 to 64 tokens");
  const auto kind_byte = static_cast<uint8_t>(kind);
  KeyInput input;
  input.Append(kDomain.data(), kDomain.size());
  input.Append(&kind_byte, 1);
  input.Append(model_fingerprint.data(), model_fingerprint.size());
  input.Append(namespace_key.data(), namespace_key.size());
  input.Append(previous == nullptr ? nullptr : previous->bytes.data(), previous == nullptr ? 0 : 32);
  input.AppendTokens(tokens);
  return input.Hash();
}

std::vector<ChunkKey> MakePrefixKeys(const Digest& model_fingerprint, const Digest& namespace_key,
                                     std::span<const int32_t> tokens) {
  std::vector<ChunkKey> keys;
  keys.reserve(tokens.size() / kChunkTokens);
  for (size_t at = 0; at + kChunkTokens <= tokens.size(); at += kChunkTokens) {
    const ChunkKey* const previous = keys.empty() ? nullptr : &keys.back();
    keys.push_back(MakeChunkKey(ChainKind::kExactPrefix, model_fingerprint, namespace_key, previous,
                                tokens.subspan(at, kChunkTokens)));
  }
  return keys;
}

ContextHash MakeContextHash(const Digest& namespace_key, std::span<const int32_t> text, uint32_t lead) {
  SPLICE_CHECK(lead <= text.size(), "the lead is part of the text");
  KeyInput input;
  input.Append(kContextDomain.data(), kContextDomain.size());
  input.Append(namespace_key.data(), namespace_key.size());
  input.AppendTokens(text.subspan(lead));
  const ChunkKey key = input.Hash();
  ContextHash hash{.lead = lead};
  std::copy_n(key.bytes.begin(), hash.digest.size(), hash.digest.begin());
  return hash;
}

}  // namespace spl::chunk
