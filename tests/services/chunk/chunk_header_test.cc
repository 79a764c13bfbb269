#include "services/chunk/chunk_header.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/chunks.h"

namespace spl::chunk {
namespace {

using testing::TestChunk;

TEST(ChunkHeader, RoundTrips) {
  Chunk chunk = TestChunk(5, 1000);
  chunk.header.namespace_id.fill(0x77);
  chunk.header.recompute_seconds = 0.125f;
  chunk.header.context = MakeContextHash({1, 2}, std::vector<int32_t>(90, 3), 70);
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
  EXPECT_EQ(decoded->namespace_id, chunk.header.namespace_id);
  EXPECT_EQ(decoded->recompute_seconds, 0.125f);
  EXPECT_EQ(decoded->context, chunk.header.context);
  EXPECT_EQ(decoded->context.lead, 70u);
}

// An older build left zeros in the place of the context, and its chunks stay readable.
TEST(ChunkHeader, OfAnOlderBuildHasNoContext) {
  const auto decoded = DecodeHeader(EncodeHeader(TestChunk(5, 1000).header));
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_FALSE(decoded->context.known());
}

TEST(ContextHash, DependsOnTheNamespaceAndTheTextBehindTheLead) {
  const std::vector<int32_t> text{5, 6, 7, 8};
  const ContextHash hash = MakeContextHash({1}, text, 2);
  EXPECT_TRUE(hash.known());
  EXPECT_EQ(MakeContextHash({1}, std::vector<int32_t>{9, 9, 7, 8}, 2), hash);
  EXPECT_NE(MakeContextHash({2}, text, 2), hash);
  EXPECT_NE(MakeContextHash({1}, std::vector<int32_t>{5, 6, 7, 9}, 2), hash);
  EXPECT_NE(MakeContextHash({1}, text, 1), hash);
  EXPECT_TRUE(MakeContextHash({1}, text, 4).known()) << "no text, which is known";
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
           [](ChunkHeader& h) { h.payload_bytes = 0; }, [](ChunkHeader& h) { h.recompute_seconds = -1; },
           [](ChunkHeader& h) { h.recompute_seconds = INFINITY; }, [](ChunkHeader& h) { h.recompute_seconds = NAN; },
           [](ChunkHeader& h) { h.payload_bytes = kMaxPayloadBytes + 1; }}) {
    ChunkHeader header = TestChunk(7, 64).header;
    change(header);
    EXPECT_EQ(CheckHeaderFields(header).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(DecodeHeader(EncodeHeader(header)).status().code(), absl::StatusCode::kDataLoss);
  }
}

TEST(CheckSameModel, NamesBothSides) {
  const ChunkHeader header = TestChunk(1, 64).header;
  EXPECT_TRUE(CheckSameModel(header, header.model_fingerprint, header.layout_digest).ok());
  Digest other;
  other.fill(0xab);
  for (const absl::Status& status :
       {CheckSameModel(header, other, header.layout_digest), CheckSameModel(header, header.model_fingerprint, other)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_NE(status.ToString().find("abababab"), std::string::npos) << status;
  }
  EXPECT_NE(CheckSameModel(header, other, other).ToString().find("11111111"), std::string::npos);
}

TEST(VerifyPieces, AreOnePayload) {
  Chunk chunk = TestChunk(8, 1000);
  const std::span<std::byte> all(chunk.payload);
  EXPECT_TRUE(
      VerifyPieces(chunk.header, {all.first(1), all.subspan(1, 0), all.subspan(1, 500), all.subspan(501)}).ok());
  EXPECT_EQ(VerifyPieces(chunk.header, {all.subspan(501), all.first(501)}).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(VerifyPieces(chunk.header, {all.first(999)}).code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(CheckPieces(chunk.header, {all.first(400), all.subspan(400)}).ok());
  EXPECT_EQ(CheckPieces(chunk.header, {all.first(400)}).code(), absl::StatusCode::kInvalidArgument);
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
