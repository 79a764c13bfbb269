#include "services/kvstore/disk_tier.h"

#include <gtest/gtest.h>
#include <rocksdb/db.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

#include "services/base/fault_point.h"
#include "services/base/status.h"
#include "tests/support/stored_chunks.h"
#include "tests/support/temp_dir.h"

namespace spl::kvstore {
namespace {

using testing::SameChunk;
using testing::TempDir;
using testing::TestChunk;
using testing::TestKey;

constexpr uint64_t kMany = 64 << 20;

size_t PayloadOf(uint64_t number) { return 1000 + number * 7919 % 60000; }

// A tier and what it needs around it.
struct Tier {
  static absl::StatusOr<std::unique_ptr<Tier>> Open(const TempDir& dir, uint64_t capacity = kMany,
                                                    bool reset_damaged_index = false) {
    auto made = std::make_unique<Tier>();
    SPLICE_ASSIGN_OR_RETURN(
        made->disk, DiskTier::Open({dir.path() + "/data", capacity, {1.0, 0.9}, reset_damaged_index}, made->catalog,
                                   made->namespaces));
    return made;
  }
  DiskTier* operator->() const { return disk.get(); }
  absl::StatusOr<StoredChunkRef> Read(uint64_t number) { return disk->Read(TestKey(number), testing::HeapSlot); }
  std::vector<StoredChunkRef> Batch(const std::vector<uint64_t>& numbers) {
    std::vector<StoredChunkRef> batch;
    for (const uint64_t number : numbers) {
      batch.push_back(testing::Stored(catalog, TestChunk(number, PayloadOf(number))));
    }
    return batch;
  }

  NamespaceTable namespaces{Clock::Real()};
  ChunkCatalog catalog{namespaces, Clock::Real()};
  std::unique_ptr<DiskTier> disk;
};

std::unique_ptr<Tier> OpenTier(const TempDir& dir, uint64_t capacity = kMany) {
  auto tier = Tier::Open(dir, capacity);
  EXPECT_TRUE(tier.ok()) << tier.status();
  return std::move(tier).value();
}

bool Has(Tier& tier, uint64_t number) {
  const auto chunk = tier.Read(number);
  EXPECT_TRUE(chunk.ok()) << chunk.status();
  if (*chunk == nullptr) return false;
  EXPECT_TRUE(SameChunk(testing::Copy(**chunk), TestChunk(number, PayloadOf(number))));
  // As TieredStore does it.
  (*chunk)->record->uses.fetch_add(1);
  tier->Touch(TestKey(number));
  return true;
}

std::vector<std::string> SlabPaths(const TempDir& dir) {
  std::vector<std::string> paths;
  for (const auto& file : std::filesystem::directory_iterator(dir.path() + "/data")) {
    if (file.path().filename().string().rfind("slab-", 0) == 0) paths.push_back(file.path());
  }
  return paths;
}

// Flips one bit inside the first slot of a slab file.
void DamageFirstSlot(const std::string& path, size_t at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(kSlabAlignment + at));
  const char byte = static_cast<char>(file.get() ^ 1);
  file.seekp(static_cast<std::streamoff>(kSlabAlignment + at));
  file.put(byte);
}

TEST(DiskTier, KeepsChunksAcrossARestart) {
  TempDir dir;
  {
    const auto tier = OpenTier(dir);
    ASSERT_TRUE((*tier)->Write(tier->Batch({1, 2, 3, 2})).status.ok());
    EXPECT_EQ((*tier)->stats().num_chunks, 3u);
    (*tier)->CheckInvariants();
  }
  const auto tier = OpenTier(dir);
  (*tier)->CheckInvariants();
  for (const uint64_t number : {1, 2, 3}) EXPECT_TRUE(Has(*tier, number)) << number;
  EXPECT_FALSE(Has(*tier, 4));
  EXPECT_EQ((*tier)->stats().num_corrupt, 0u);
}

TEST(DiskTier, DropsAndCountsADamagedChunk) {
  for (const size_t at : {size_t{0}, size_t{20}, chunk::kEncodedHeaderBytes + 17}) {
    TempDir dir;
    const auto tier = OpenTier(dir);
    ASSERT_TRUE((*tier)->Write(tier->Batch({1})).status.ok());
    ASSERT_EQ(SlabPaths(dir).size(), 1u);
    DamageFirstSlot(SlabPaths(dir)[0], at);
    EXPECT_FALSE(Has(*tier, 1)) << "byte " << at;
    EXPECT_FALSE((*tier)->Contains(TestKey(1)));
    EXPECT_EQ((*tier)->stats().num_corrupt, 1u);
    (*tier)->CheckInvariants();
    ASSERT_TRUE((*tier)->Write(tier->Batch({1})).status.ok());
    EXPECT_TRUE(Has(*tier, 1)) << "it can be stored again";
  }
}

TEST(DiskTier, EvictsTheLeastUsedAndHoldsItsQuota) {
  TempDir dir;
  constexpr uint64_t kCapacity = 1 << 20;
  const auto tier = OpenTier(dir, kCapacity);
  ASSERT_TRUE((*tier)->Write(tier->Batch({0})).status.ok());
  for (uint64_t number = 1; number < 200; ++number) {
    ASSERT_TRUE((*tier)->Write(tier->Batch({number})).status.ok()) << number;
    ASSERT_TRUE(Has(*tier, 0)) << "in use all the time, after " << number;
    ASSERT_TRUE(Has(*tier, number));
    (*tier)->CheckInvariants();
  }
  EXPECT_GT((*tier)->stats().num_evicted, 100u);
  EXPECT_LE((*tier)->stats().bytes, kCapacity);
  uint64_t allocated = 0;
  for (const std::string& path : SlabPaths(dir)) {
    struct stat info;
    ASSERT_EQ(stat(path.c_str(), &info), 0);
    allocated += static_cast<uint64_t>(info.st_blocks) * 512;
  }
  // One header block a file comes on top; file systems round up a little.
  EXPECT_LE(allocated, kCapacity + SlabPaths(dir).size() * 3 * kSlabAlignment);
}

TEST(DiskTier, ABatchLargerThanTheTierKeepsItsEnd) {
  TempDir dir;
  const auto tier = OpenTier(dir, 1 << 20);
  std::vector<uint64_t> numbers;
  for (uint64_t number = 0; number < 100; ++number) numbers.push_back(number);
  EXPECT_TRUE((*tier)->Write(tier->Batch(numbers)).status.ok());
  EXPECT_TRUE(Has(*tier, 99));
  EXPECT_FALSE(Has(*tier, 0));
  (*tier)->CheckInvariants();
}

TEST(DiskTier, RefusesAChunkLargerThanItself) {
  TempDir dir;
  const auto tier = OpenTier(dir, 1 << 20);
  std::vector<StoredChunkRef> batch = tier->Batch({1});
  batch.push_back(testing::Stored(tier->catalog, TestChunk(2, 2 << 20)));
  batch.push_back(tier->Batch({3})[0]);
  const DiskTier::WriteResult result = (*tier)->Write(batch);
  EXPECT_EQ(result.status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(result.num_failed, 1u);
  EXPECT_TRUE(Has(*tier, 1));
  EXPECT_TRUE(Has(*tier, 3));
  (*tier)->CheckInvariants();
}

TEST(DiskTier, AFailedWriteIndexesNothing) {
  ScopedFaults faults;
  TempDir dir;
  const auto tier = OpenTier(dir);
  ASSERT_TRUE(ArmFaultFromFlag("kvstore.slab.write=error(UNAVAILABLE)@2").ok());
  const DiskTier::WriteResult result = (*tier)->Write(tier->Batch({1, 2, 3}));
  EXPECT_EQ(result.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(result.num_failed, 2u);
  EXPECT_FALSE(Has(*tier, 1));
  EXPECT_FALSE(Has(*tier, 2));
  EXPECT_TRUE(Has(*tier, 3)) << "the rest is written after the failure";
  (*tier)->CheckInvariants();
  ASSERT_TRUE(ArmFaultFromFlag("kvstore.slab.write=corrupt").ok());
  ASSERT_TRUE((*tier)->Write(tier->Batch({4})).status.ok());
  EXPECT_FALSE(Has(*tier, 4));
  EXPECT_EQ((*tier)->stats().num_corrupt, 1u);
}

// The file system has room for some slots, not for a whole step of growth.
TEST(DiskTier, ANearlyFullDiskIsUsedInSmallerSteps) {
  TempDir dir;
  const auto tier = OpenTier(dir);
  const ScopedFaults faults;
  ASSERT_TRUE(ArmFaultFromFlag("kvstore.slab.grow=error(RESOURCE_EXHAUSTED)@1").ok());
  EXPECT_TRUE((*tier)->Write(tier->Batch({1})).status.ok());
  EXPECT_GE(FaultHits("kvstore.slab.grow"), 2u);
  EXPECT_TRUE(Has(*tier, 1));
  (*tier)->CheckInvariants();
  // No room for a single slot, and nothing that could be evicted for it.
  TempDir full_dir;
  const auto full = OpenTier(full_dir);
  ASSERT_TRUE(ArmFaultFromFlag("kvstore.slab.grow=error(RESOURCE_EXHAUSTED)").ok());
  const auto refused = (*full)->Write(full->Batch({1}));
  EXPECT_EQ(refused.status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(refused.num_failed, 1u);
  (*full)->CheckInvariants();
}

TEST(DiskTier, ADamagedIndexIsResetOnlyWhenThatIsAskedFor) {
  for (const std::string prefix : {"CURRENT", "MANIFEST"}) {
    TempDir dir;
    {
      const auto tier = OpenTier(dir);
      ASSERT_TRUE((*tier)->Write(tier->Batch({1, 2, 3})).status.ok());
    }
    for (const auto& file : std::filesystem::directory_iterator(dir.path() + "/data/index")) {
      if (file.path().filename().string().starts_with(prefix)) std::ofstream(file.path(), std::ios::trunc) << "garbage";
    }
    const auto refused = Tier::Open(dir);
    ASSERT_EQ(refused.status().code(), absl::StatusCode::kDataLoss) << refused.status();
    EXPECT_NE(refused.status().message().find("--reset-damaged-index"), std::string::npos);
    {
      auto reset = Tier::Open(dir, kMany, true);
      ASSERT_TRUE(reset.ok()) << reset.status();
      EXPECT_EQ((**reset)->stats().num_index_resets, 1u);
      EXPECT_EQ((**reset)->stats().num_chunks, 0u);
      (**reset)->CheckInvariants();
      EXPECT_FALSE(Has(**reset, 1));
      ASSERT_TRUE((**reset)->Write((*reset)->Batch({1, 2})).status.ok());
      EXPECT_TRUE(Has(**reset, 1));
    }
    auto again = Tier::Open(dir, kMany, true);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ((**again)->stats().num_index_resets, 0u);
    EXPECT_TRUE(Has(**again, 2));
    const auto is_kept = [](const auto& file) { return file.path().filename().string().starts_with("index.damaged-"); };
    const std::filesystem::directory_iterator files(dir.path() + "/data");
    EXPECT_EQ(std::count_if(begin(files), end(files), is_kept), 1);
  }
}

TEST(DiskTier, ADiskErrorOnReadIsAFailureNotAMiss) {
  ScopedFaults faults;
  TempDir dir;
  const auto tier = OpenTier(dir);
  ASSERT_TRUE((*tier)->Write(tier->Batch({1})).status.ok());
  ASSERT_TRUE(ArmFaultFromFlag("kvstore.slab.read=error(UNAVAILABLE)").ok());
  EXPECT_EQ(tier->Read(1).status().code(), absl::StatusCode::kUnavailable);
  DisarmAllFaults();
  EXPECT_TRUE(Has(*tier, 1)) << "nothing was dropped";
}

TEST(DiskTier, SurvivesGarbageSlabsAndRefusesForeignDirectories) {
  TempDir dir;
  {
    const auto tier = OpenTier(dir);
    ASSERT_TRUE((*tier)->Write(tier->Batch({1, 2, 3})).status.ok());
  }
  const std::vector<std::string> paths = SlabPaths(dir);
  ASSERT_EQ(paths.size(), 3u);
  std::ofstream(paths[0], std::ios::trunc) << "garbage that is no slab file at all";
  std::filesystem::resize_file(paths[1], kSlabAlignment + 100);  // torn off inside its first slot
  {
    const auto tier = OpenTier(dir);
    (*tier)->CheckInvariants();
    EXPECT_EQ((*tier)->stats().num_chunks, 1u);
    EXPECT_EQ((*tier)->stats().num_corrupt, 2u);
    EXPECT_EQ(Has(*tier, 1) + Has(*tier, 2) + Has(*tier, 3), 1);
    ASSERT_TRUE((*tier)->Write(tier->Batch({1, 2, 3})).status.ok());
    EXPECT_EQ(Has(*tier, 1) + Has(*tier, 2) + Has(*tier, 3), 3);
    EXPECT_EQ(Tier::Open(dir).status().code(), absl::StatusCode::kFailedPrecondition) << "one process at a time";
  }
  std::ofstream(dir.path() + "/data/VERSION", std::ios::trunc) << "splice-kvstore data 999\n";
  const absl::Status version = Tier::Open(dir).status();
  EXPECT_EQ(version.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(version.ToString().find("999"), std::string::npos) << version;
  std::filesystem::rename(dir.path() + "/data/VERSION", dir.path() + "/data/VERSION.new");
  EXPECT_EQ(Tier::Open(dir).status().code(), absl::StatusCode::kFailedPrecondition);
  TempDir cut_off;  // a first start that died before the rename
  std::filesystem::create_directory(cut_off.path() + "/data");
  std::ofstream(cut_off.path() + "/data/VERSION.new") << "spl";
  EXPECT_TRUE(Tier::Open(cut_off).ok());
  TempDir foreign;
  std::filesystem::create_directory(foreign.path() + "/data");
  std::ofstream(foreign.path() + "/data/letters.txt") << "dear diary";
  EXPECT_EQ(Tier::Open(foreign).status().code(), absl::StatusCode::kFailedPrecondition);
}

// What the first version of the store left: rows without a namespace, headers without the fields that were zero then.
TEST(DiskTier, UpgradesADirectoryOfTheFirstVersion) {
  TempDir dir;
  chunk::Chunk old = TestChunk(1, PayloadOf(1));
  old.header.recompute_seconds = 0;
  {
    const auto tier = OpenTier(dir);
    const StoredChunkRef stored = testing::Stored(tier->catalog, old);
    ASSERT_TRUE((*tier)->Write({&stored, 1}).status.ok());
  }
  {
    rocksdb::DB* db = nullptr;
    std::vector<rocksdb::ColumnFamilyHandle*> families;
    const std::string index = dir.path() + "/data/index";
    ASSERT_TRUE(rocksdb::DB::Open({}, index, {{"default", {}}, {"records", {}}}, &families, &db).ok());
    const std::unique_ptr<rocksdb::DB> owned(db);
    ASSERT_TRUE(db->DropColumnFamily(families[1]).ok()) << "there were no records in that version";
    for (rocksdb::ColumnFamilyHandle* const family : families) {
      ASSERT_TRUE(db->DestroyColumnFamilyHandle(family).ok());
    }
    const std::string key = "k" + std::string(reinterpret_cast<const char*>(old.header.key.bytes.data()), 32);
    std::string row;
    ASSERT_TRUE(db->Get({}, key, &row).ok());
    row = '\1' + row.substr(1, 24);
    ASSERT_TRUE(db->Put({}, key, row).ok());
  }
  const std::string version = dir.path() + "/data/VERSION";
  std::ofstream(version, std::ios::trunc) << "splice-kvstore data 1\n";
  for (int start = 0; start < 2; ++start) {
    const auto tier = OpenTier(dir);
    const auto read = tier->Read(1);
    ASSERT_TRUE(read.ok() && *read != nullptr) << read.status();
    EXPECT_TRUE(SameChunk(testing::Copy(**read), old));
    EXPECT_EQ((*tier)->stats().num_corrupt, 0u);
    EXPECT_EQ(tier->namespaces.Stat(chunk::kDefaultNamespace)->num_chunks, 1u);
    (*tier)->CheckInvariants();
  }
  std::string line;
  std::getline(std::ifstream(version) >> std::ws, line);
  EXPECT_EQ(line, "splice-kvstore data 3") << "so that an older program refuses it";
}

TEST(DiskTier, ASmallerCapacityAfterARestartEvicts) {
  TempDir dir;
  std::vector<uint64_t> numbers;
  for (uint64_t number = 0; number < 100; ++number) numbers.push_back(number);
  {
    const auto tier = OpenTier(dir);
    ASSERT_TRUE((*tier)->Write(tier->Batch(numbers)).status.ok());
  }
  const auto tier = OpenTier(dir, 1 << 20);
  (*tier)->CheckInvariants();
  EXPECT_GT((*tier)->stats().num_chunks, 5u);
  EXPECT_LT((*tier)->stats().num_chunks, 100u);
  EXPECT_TRUE(Has(*tier, 99)) << "the newest stay";
  EXPECT_FALSE(Has(*tier, 0));
}

// Against the plainest model there is: what Read gives is the right chunk or nothing, and nothing only after eviction.
TEST(DiskTier, RandomOperationsAndRestarts) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  TempDir dir;
  std::set<uint64_t> written;
  auto tier = OpenTier(dir, 8 << 20);
  uint64_t evicted_before = 0;
  for (int step = 0; step < 600; ++step) {
    const uint64_t number = random() % 120;
    if (random() % 100 == 0) {
      evicted_before += (*tier)->stats().num_evicted;
      tier.reset();
      tier = OpenTier(dir, 8 << 20);
    } else if (random() % 3 == 0) {
      ASSERT_TRUE((*tier)->Write(tier->Batch({number, (number + 1) % 120})).status.ok());
      written.insert({number, (number + 1) % 120});
    } else {
      const bool has = Has(*tier, number);
      ASSERT_TRUE(!has || written.count(number) != 0);
      ASSERT_TRUE(has || written.count(number) == 0 || evicted_before + (*tier)->stats().num_evicted > 0);
    }
    ASSERT_EQ((*tier)->stats().num_corrupt, 0u);
    (*tier)->CheckInvariants();
  }
}

TEST(DiskTier, ReadersAndAWriterTogether) {
  TempDir dir;
  const auto tier = OpenTier(dir, 2 << 20);  // small: slots are evicted and written again under the readers
  std::atomic<bool> stop{false};
  std::atomic<int> num_wrong{0}, num_hits{0};
  std::vector<std::thread> readers;
  for (uint64_t t = 0; t < 4; ++t) {
    readers.emplace_back([&, t] {
      std::mt19937_64 random(t);
      while (!stop.load()) {
        const uint64_t number = random() % 100;
        const auto chunk = tier->Read(number);
        if (!chunk.ok()) ++num_wrong;
        if (!chunk.ok() || *chunk == nullptr) continue;
        ++num_hits;
        if (!SameChunk(testing::Copy(**chunk), TestChunk(number, PayloadOf(number)))) ++num_wrong;
      }
    });
  }
  std::mt19937_64 random(99);
  for (int i = 0; i < 300 || num_hits.load() < 100; ++i) {
    const DiskTier::WriteResult result = (*tier)->Write(tier->Batch({random() % 100, random() % 100}));
    if (!result.status.ok() && result.status.code() != absl::StatusCode::kResourceExhausted) ++num_wrong;
  }
  stop.store(true);
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(num_wrong.load(), 0);
  EXPECT_EQ((*tier)->stats().num_corrupt, 0u);
  (*tier)->CheckInvariants();
}

}  // namespace
}  // namespace spl::kvstore
