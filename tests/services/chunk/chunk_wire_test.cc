#include "services/chunk/remote/chunk_wire.h"

#include <gtest/gtest.h>

#include "tests/support/chunks.h"

namespace spl::chunk {
namespace {

using testing::SameChunk;
using testing::TestChunk;

std::vector<v1::ChunkPart> PartsOf(const Chunk& chunk) {
  std::vector<v1::ChunkPart> parts;
  ChunkCutter cutter(chunk);
  v1::ChunkPart part;
  while (cutter.Next(part)) parts.push_back(part);
  return parts;
}

TEST(ChunkWire, CutsAndAssembles) {
  ChunkAssembler assembler;
  for (const size_t bytes : {size_t{1}, kPartBytes - 1, kPartBytes, kPartBytes + 1, 3 * kPartBytes}) {
    const Chunk chunk = TestChunk(bytes, bytes);
    const std::vector<v1::ChunkPart> parts = PartsOf(chunk);
    EXPECT_EQ(parts.size(), (bytes + kPartBytes - 1) / kPartBytes);
    for (size_t i = 0; i < parts.size(); ++i) {
      const auto out = assembler.Add(parts[i]);
      ASSERT_TRUE(out.ok()) << out.status();
      ASSERT_EQ(out->has_value(), i + 1 == parts.size());
      EXPECT_EQ(assembler.pending(), i + 1 != parts.size());
      if (out->has_value()) {
        EXPECT_TRUE(SameChunk(**out, chunk));
      }
    }
  }
}

TEST(ChunkWire, NamespacesPinsAndOptions) {
  ChunkHeader header = TestChunk(1, 100).header;
  EXPECT_TRUE(MetaFromHeader(header).namespace_id().empty()) << "as older programs send it";
  EXPECT_EQ(HeaderFromMeta(MetaFromHeader(header))->namespace_id, kDefaultNamespace);
  header.namespace_id.fill(9);
  header.recompute_seconds = 0.5f;
  EXPECT_TRUE(MetaFromHeader(header).context().empty()) << "unknown";
  header.context = MakeContextHash({4}, std::vector<int32_t>(0x1ff, 6), 0x102);
  v1::ChunkMeta meta = MetaFromHeader(header);
  EXPECT_EQ(EncodeHeader(*HeaderFromMeta(meta)), EncodeHeader(header));
  meta.set_namespace_id("short");
  EXPECT_EQ(HeaderFromMeta(meta).status().code(), absl::StatusCode::kInvalidArgument);
  const auto options = PutOptionsFromWire(PutOptionsToWire({.durable = true, .pin = Pin::kSoft}));
  EXPECT_TRUE(options->durable);
  EXPECT_FALSE(options->require_namespace);
  EXPECT_EQ(options->pin, Pin::kSoft);
  EXPECT_EQ(PinFromWire(static_cast<v1::Pin>(7)).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ChunkWire, RefusesBadStreams) {
  const std::vector<v1::ChunkPart> good = PartsOf(TestChunk(1, kPartBytes + 10));
  const auto code_of = [](std::vector<v1::ChunkPart> parts) {
    ChunkAssembler assembler;
    for (const v1::ChunkPart& part : parts) {
      const auto out = assembler.Add(part);
      if (!out.ok()) return out.status().code();
    }
    return absl::StatusCode::kOk;
  };
  EXPECT_EQ(code_of({good[1]}), absl::StatusCode::kInvalidArgument) << "no meta";
  EXPECT_EQ(code_of({good[0], good[0]}), absl::StatusCode::kInvalidArgument) << "meta twice";
  auto early = good;
  early[0].set_last(true);
  EXPECT_EQ(code_of(early), absl::StatusCode::kDataLoss) << "ends early";
  auto longer = good;
  longer[1].mutable_data()->append("x");
  EXPECT_EQ(code_of(longer), absl::StatusCode::kInvalidArgument) << "too many bytes";
  auto large = good;
  large[0].mutable_data()->append("x");
  EXPECT_EQ(code_of(large), absl::StatusCode::kInvalidArgument) << "part over 1 MiB";
  auto flipped = good;
  (*flipped[1].mutable_data())[3] ^= 1;
  EXPECT_EQ(code_of(flipped), absl::StatusCode::kDataLoss);
  for (const auto& change : std::vector<void (*)(v1::ChunkMeta&)>{
           [](v1::ChunkMeta& m) { m.set_key("short"); }, [](v1::ChunkMeta& m) { m.clear_layout_digest(); },
           [](v1::ChunkMeta& m) { m.set_model_fingerprint(std::string(33, 'x')); },
           [](v1::ChunkMeta& m) { m.set_num_tokens(65); }, [](v1::ChunkMeta& m) { m.set_provenance(259); },
           [](v1::ChunkMeta& m) { m.set_payload_bytes(UINT64_MAX); },
           [](v1::ChunkMeta& m) { m.set_context(std::string(12, 'x')); }}) {
    auto bad = good;
    change(*bad[0].mutable_meta());
    EXPECT_EQ(code_of(bad), absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace spl::chunk
