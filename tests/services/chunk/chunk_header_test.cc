#include "services/chunk/chunk_header.h"

#include <gtest/gtest.h>

#include "tests/support/chunks.h"

namespace spl::chunk {
namespace {

using testing::TestChunk;

TEST(ChunkHeader, RoundTrips) {
  const Chunk chunk = TestChunk(5, 1000);
  const auto bytes = EncodeHeader(chunk.header);
  EXPECT_EQ(std::memcmp(bytes.data(), "SPLCHUNK", 8), 0);
  const auto decoded = DecodeHeader(bytes);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->key, chunk.header.key);
  EXPECT_EQ(decoded->model_fingerprint, chunk.header.model_fingerprint);
  EXPECT_EQ(decoded->layout_digest, chunk.header.layout_digest);
  EXPECT_EQ(decoded->num_tokens, 64u);
  EXPECT_EQ(decoded->first_position, 5u * 64);
  EXPECT_EQ(decoded->provenance, Provenance::kExact);
  EXPECT_EQ(decoded->payload_bytes, 1000u);
  EXPECT_EQ(decoded->payload_crc32c, chunk.header.payload_crc32c);
}

TEST(ChunkHeader, AnyFlippedBitIsDataLoss) {
  const auto good = EncodeHeader(TestChunk(6, 64).header);
  for (size_t bit = 0; bit < good.size() * 8; ++bit) {
    auto bad = good;
    bad[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    EXPECT_EQ(DecodeHeader(bad).status().code(), absl::StatusCode::kDataLoss) << "bit " << bit;
  }
  EXPECT_EQ(DecodeHeader(std::span(good).first(191)).status().code(), absl::StatusCode::kDataLoss);
}

TEST(ChunkHeader, RefusesFieldsOutOfRangeEvenWithAGoodChecksum) {
  for (const auto& change : std::vector<void (*)(ChunkHeader&)>{
           [](ChunkHeader& h) { h.num_tokens = 0; }, [](ChunkHeader& h) { h.num_tokens = 65; },
           [](ChunkHeader& h) { h.provenance = static_cast<Provenance>(1); },
           [](ChunkHeader& h) { h.payload_bytes = 0; },
           [](ChunkHeader& h) { h.payload_bytes = kMaxPayloadBytes + 1; }}) {
    ChunkHeader header = TestChunk(7, 64).header;
    change(header);
    EXPECT_EQ(CheckHeaderFields(header).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(DecodeHeader(EncodeHeader(header)).status().code(), absl::StatusCode::kDataLoss);
  }
}

TEST(VerifyPayload, NoticesSizeAndBytes) {
  Chunk chunk = TestChunk(8, 4096);
  EXPECT_TRUE(VerifyPayload(chunk.header, chunk.payload).ok());
  chunk.payload[4095] ^= std::byte(0x80);
  EXPECT_EQ(VerifyPayload(chunk.header, chunk.payload).code(), absl::StatusCode::kDataLoss);
  chunk.payload.pop_back();
  EXPECT_EQ(VerifyPayload(chunk.header, chunk.payload).code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace spl::chunk
