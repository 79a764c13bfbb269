#include "services/kvstore/slab_file.h"

#include <gtest/gtest.h>

#include <fstream>

#include "tests/support/chunks.h"
#include "tests/support/temp_dir.h"

namespace spl::kvstore {
namespace {

using testing::SameChunk;
using testing::TempDir;
using testing::TestChunk;

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
  const std::string path = dir.path() + "/slab";
  {
    auto file = std::move(SlabFile::Open(path, 8192)).value();
    ASSERT_TRUE(file->Grow(4).ok());
    ASSERT_TRUE(file->Write(3, TestChunk(3, 5000)).ok());
    ASSERT_TRUE(file->Write(0, TestChunk(0, 8000)).ok());
    ASSERT_TRUE(file->Sync().ok());
  }
  auto file = std::move(SlabFile::Open(path, 8192)).value();
  EXPECT_EQ(file->num_slots(), 4u);
  EXPECT_TRUE(SameChunk(*file->Read(3), TestChunk(3, 5000)));
  EXPECT_TRUE(SameChunk(*file->Read(0), TestChunk(0, 8000)));
  EXPECT_EQ(file->Read(1).status().code(), absl::StatusCode::kDataLoss) << "never written";
  ASSERT_TRUE(file->Punch(3).ok());
  EXPECT_EQ(file->Read(3).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(file->Read(99).status().code(), absl::StatusCode::kDataLoss) << "beyond the end";
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
