#include "services/kvstore/slab_file.h"

#include <gtest/gtest.h>

#include <fstream>

#include "services/base/status.h"
#include "tests/support/stored_chunks.h"
#include "tests/support/temp_dir.h"

namespace spl::kvstore {
namespace {

using testing::SameChunk;
using testing::TempDir;
using testing::TestChunk;

// Writes a chunk into a slot, and reads one back.
struct SlotIo {
  absl::Status Write(SlabFile& file, uint64_t slot, const chunk::Chunk& chunk) {
    const StoredChunkRef stored = testing::Stored(catalog, chunk);
    return file.Write(slot, {stored->slot.data(), static_cast<size_t>(PaddedBytes(chunk.payload.size()))});
  }
  static absl::StatusOr<chunk::Chunk> Read(const SlabFile& file, uint64_t slot) {
    const auto buffer = SlotBuffer::OnHeap(file.slot_bytes());
    SPLICE_ASSIGN_OR_RETURN(const chunk::ChunkHeader header, file.Read(slot, {buffer->data(), buffer->size()}));
    const std::byte* const payload = buffer->data() + chunk::kEncodedHeaderBytes;
    return chunk::Chunk{header, {payload, payload + header.payload_bytes}};
  }
  NamespaceTable namespaces{Clock::Real()};
  ChunkCatalog catalog{namespaces, Clock::Real()};
};

TEST(SlotBytesFor, HoldsThePayloadAndWastesLittle) {
  for (uint64_t payload = 1; payload < 64 << 20; payload = payload * 5 / 4 + 1) {
    const uint64_t slot = SlotBytesFor(payload);
    EXPECT_EQ(slot % kSlabAlignment, 0u);
    EXPECT_GE(slot, payload + chunk::kEncodedHeaderBytes);
    EXPECT_LE(slot, (payload + chunk::kEncodedHeaderBytes) * 9 / 8 + 2 * kSlabAlignment);
  }
}

TEST(SlabFile, KeepsSlotsAcrossOpening) {
  TempDir dir;
  SlotIo io;
  const std::string path = dir.path() + "/slab";
  {
    auto file = std::move(SlabFile::Open(path, 8192)).value();
    ASSERT_TRUE(file->Grow(4).ok());
    ASSERT_TRUE(io.Write(*file, 3, TestChunk(3, 5000)).ok());
    ASSERT_TRUE(io.Write(*file, 0, TestChunk(0, 8000)).ok());
    ASSERT_TRUE(file->Sync().ok());
  }
  auto file = std::move(SlabFile::Open(path, 8192)).value();
  EXPECT_EQ(file->num_slots(), 4u);
  EXPECT_TRUE(SameChunk(*io.Read(*file, 3), TestChunk(3, 5000)));
  EXPECT_TRUE(SameChunk(*io.Read(*file, 0), TestChunk(0, 8000)));
  EXPECT_EQ(io.Read(*file, 1).status().code(), absl::StatusCode::kDataLoss) << "never written";
  ASSERT_TRUE(file->Punch(3).ok());
  EXPECT_EQ(io.Read(*file, 3).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(io.Read(*file, 99).status().code(), absl::StatusCode::kDataLoss) << "beyond the end";
}

TEST(SlabFile, TellsDamageFromAnotherVersion) {
  TempDir dir;
  const std::string path = dir.path() + "/slab";
  { ASSERT_TRUE(SlabFile::Open(path, 8192).ok()); }
  EXPECT_EQ(SlabFile::Open(path, 4096).status().code(), absl::StatusCode::kDataLoss) << "name and header differ";
  std::fstream(path, std::ios::in | std::ios::out).seekp(16).put('x');
  EXPECT_EQ(SlabFile::Open(path, 8192).status().code(), absl::StatusCode::kDataLoss);
  std::ofstream(path, std::ios::trunc) << "short";
  EXPECT_EQ(SlabFile::Open(path, 8192).status().code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace spl::kvstore
