// A pool of pages of a small shape, and names for chunks, for tests of what is cached in it.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "services/chunk/chunk.h"
#include "services/engine/cache/page_pool.h"
#include "services/engine/cache/sequence_kv.h"

namespace spl::engine {

inline constexpr KvShape kShape{.num_layers = 2, .num_kv_heads = 3};

class CacheTest : public testing::Test {
 protected:
  static constexpr int32_t kPages = 240;
  CacheTest() : memory_(kPages * 2 * 64 * 8 * sizeof(float)) {}
  kernels::KvPoolView view() { return {reinterpret_cast<std::byte*>(memory_.data()), kernels::DType::kF32, 8, kPages}; }
  static chunk::ChunkKey Key(uint8_t x) {
    chunk::ChunkKey key;
    key.bytes[0] = x;
    return key;
  }
  static std::vector<chunk::ChunkKey> Keys(uint8_t first, int count) {
    std::vector<chunk::ChunkKey> keys;
    for (int i = 0; i < count; ++i) keys.push_back(Key(static_cast<uint8_t>(first + i)));
    return keys;
  }
  std::vector<char> memory_;
  PagePool pool_{view()};
};

}  // namespace spl::engine
