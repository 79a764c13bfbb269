// Chunks whose every byte follows from a number, so that a test can tell a wrong one from a missing one.
#pragma once

#include <cstring>
#include <random>

#include "kernels/kv_copy/crc32c.h"
#include "services/chunk/chunk.h"

namespace spl::testing {

inline chunk::ChunkKey TestKey(uint64_t number) {
  chunk::ChunkKey key;
  std::mt19937_64 random(number * 2 + 1);
  for (size_t i = 0; i < 4; ++i) {
    const uint64_t word = random();
    std::memcpy(key.bytes.data() + 8 * i, &word, sizeof(word));
  }
  return key;
}

inline chunk::Chunk TestChunk(uint64_t number, size_t payload_bytes) {
  chunk::Chunk chunk;
  chunk.payload.resize(payload_bytes);
  std::mt19937_64 random(number);
  for (size_t i = 0; i + 8 <= payload_bytes; i += 8) {
    const uint64_t word = random();
    std::memcpy(chunk.payload.data() + i, &word, sizeof(word));
  }
  chunk.header.key = TestKey(number);
  chunk.header.model_fingerprint.fill(0x11);
  chunk.header.layout_digest.fill(0x22);
  chunk.header.num_tokens = 64;
  chunk.header.first_position = static_cast<uint32_t>(number % 1000) * 64;
  chunk.header.provenance = chunk::Provenance::kExact;
  chunk.header.payload_bytes = payload_bytes;
  chunk.header.payload_crc32c = kernels::Crc32cExtend(0, chunk.payload.data(), payload_bytes);
  // Equal value per byte, exactly: eviction then goes by use alone.
  chunk.header.recompute_seconds = static_cast<float>(payload_bytes) / (1 << 20);
  return chunk;
}

inline bool SameChunk(const chunk::Chunk& a, const chunk::Chunk& b) {
  return chunk::EncodeHeader(a.header) == chunk::EncodeHeader(b.header) && a.payload == b.payload;
}

}  // namespace spl::testing
