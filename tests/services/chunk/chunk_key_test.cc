#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "services/chunk/chunk.h"

namespace spl::chunk {
namespace {

Digest Counting() {
  Digest digest;
  std::iota(digest.begin(), digest.end(), 0);
  return digest;
}

Digest Filled(uint8_t value) {
  Digest digest;
  digest.fill(value);
  return digest;
}

// Computed from docs/data-formats.md with another program's SHA-256.
TEST(ChunkKey, EqualsTheDocumentedEncoding) {
  std::vector<int32_t> tokens(130);
  std::iota(tokens.begin(), tokens.end(), 0);
  const std::vector<ChunkKey> keys = MakePrefixKeys(Counting(), Filled(7), tokens);
  ASSERT_EQ(keys.size(), 2u) << "the last two tokens fill no chunk";
  EXPECT_EQ(keys[0].ToHex(), "e47d06d69d54f54a94aa0e8365ee420c27cc60375f67111e5c1d71cf66c95054");
  EXPECT_EQ(keys[1].ToHex(), "c5af422379374aecefb89018d531f876ea1725f6e4108009b53d174575f9f307");
  const std::vector<int32_t> odd = {-1, 5};
  EXPECT_EQ(MakeChunkKey(ChainKind::kSegment, Counting(), Filled(7), &keys[0], odd).ToHex(),
            "b618802cd714a185e73cc9e0cdc2678716f3cedc896ba05c192e0521e7d9adb4");
}

TEST(ChunkKey, EveryInputMatters) {
  const std::vector<int32_t> tokens = {1, 2, 3};
  const std::vector<int32_t> other = {1, 2, 4};
  const std::vector<int32_t> shorter = {1, 2};
  const ChunkKey base = MakeChunkKey(ChainKind::kExactPrefix, Filled(1), Filled(2), nullptr, tokens);
  std::set<std::string> keys = {base.ToHex()};
  const ChunkKey zero{};
  for (const ChunkKey& key : {MakeChunkKey(ChainKind::kSegment, Filled(1), Filled(2), nullptr, tokens),
                              MakeChunkKey(ChainKind::kExactPrefix, Filled(3), Filled(2), nullptr, tokens),
                              MakeChunkKey(ChainKind::kExactPrefix, Filled(1), Filled(3), nullptr, tokens),
                              MakeChunkKey(ChainKind::kExactPrefix, Filled(2), Filled(1), nullptr, tokens),
                              MakeChunkKey(ChainKind::kExactPrefix, Filled(1), Filled(2), &zero, tokens),
                              MakeChunkKey(ChainKind::kExactPrefix, Filled(1), Filled(2), &base, tokens),
                              MakeChunkKey(ChainKind::kExactPrefix, Filled(1), Filled(2), nullptr, other),
                              MakeChunkKey(ChainKind::kExactPrefix, Filled(1), Filled(2), nullptr, shorter)}) {
    EXPECT_TRUE(keys.insert(key.ToHex()).second);
  }
}

TEST(ChunkKey, APrefixKeepsItsKeysWhenThePromptGrows) {
  std::vector<int32_t> tokens(640, 9);
  const std::vector<ChunkKey> all = MakePrefixKeys(Filled(1), Filled(2), tokens);
  ASSERT_EQ(all.size(), 10u);
  const std::vector<ChunkKey> head = MakePrefixKeys(Filled(1), Filled(2), std::span(tokens).first(64 * 4 + 63));
  ASSERT_EQ(head.size(), 4u);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(head[i], all[i]);
  EXPECT_TRUE(MakePrefixKeys(Filled(1), Filled(2), std::span(tokens).first(63)).empty());
}

}  // namespace
}  // namespace spl::chunk
