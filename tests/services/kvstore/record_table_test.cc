// Records: compare-and-swap, lists, limits, and what is left of them after a restart.
#include "services/kvstore/record_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "services/base/fault_point.h"
#include "services/kvstore/disk_index.h"
#include "tests/support/temp_dir.h"

namespace spl::kvstore {
namespace {

using testing::TempDir;

constexpr chunk::Digest kAlice = {1, 2, 3};
constexpr chunk::Digest kBob = {1, 2, 4};

std::vector<std::string> Names(const std::vector<Record>& records) {
  std::vector<std::string> names;
  for (const Record& record : records) names.push_back(record.name);
  return names;
}

// The same contract over memory and over RocksDB.
class RecordTableTest : public ::testing::TestWithParam<bool> {
 protected:
  RecordTableTest() { Open(); }
  void Open() {
    table_.reset();
    if (GetParam()) {
      storage_.reset();
      auto index = DiskIndex::Open(dir_.path() + "/index");
      ASSERT_TRUE(index.ok()) << index.status();
      storage_ = *std::move(index);
    } else if (storage_ == nullptr) {
      storage_ = MakeMemoryRecordStorage(64 << 20);
    }
    auto table = RecordTable::Open(*storage_, GetParam(), clock_);
    ASSERT_TRUE(table.ok()) << table.status();
    table_ = *std::move(table);
  }

  TempDir dir_;
  FakeClock clock_;
  std::unique_ptr<RecordStorage> storage_;
  std::unique_ptr<RecordTable> table_;
};

TEST_P(RecordTableTest, PutGetAndListByOwner) {
  clock_.Advance(std::chrono::seconds(5));
  ASSERT_TRUE(table_->Put(kAlice, "kb/ships", "{}", {}).ok());
  ASSERT_TRUE(table_->Put(kAlice, "kb/tea", std::string(100'000, 'x'), {}).ok());
  ASSERT_TRUE(table_->Put(kAlice, "other", "", {}).ok());
  ASSERT_TRUE(table_->Put(kBob, "kb/ships", "bob's", {}).ok());
  const auto ships = table_->Get(kAlice, "kb/ships");
  ASSERT_TRUE(ships.ok()) << ships.status();
  EXPECT_EQ(ships->value, "{}");
  EXPECT_EQ(ships->modified_ms, 3'605'000u);
  EXPECT_EQ(table_->Get(kBob, "kb/ships")->value, "bob's");
  EXPECT_EQ(table_->Get(kBob, "kb/tea").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Names(table_->List(kAlice, "kb/", "", 0)->records), (std::vector<std::string>{"kb/ships", "kb/tea"}));
  EXPECT_EQ(Names(table_->List(kAlice, "", "", 0)->records), (std::vector<std::string>{"kb/ships", "kb/tea", "other"}));
  EXPECT_EQ(table_->List(kAlice, "kb/tea", "", 0)->records[0].value_bytes, 100'000u);
  EXPECT_EQ(table_->List(kAlice, "kb/tea", "", 0)->records[0].value, "");
  EXPECT_EQ(Names(table_->List(kBob, "", "", 0)->records), std::vector<std::string>{"kb/ships"});
  const auto page = table_->List(kAlice, "", "", 2);
  EXPECT_TRUE(page->more);
  const auto rest = table_->List(kAlice, "", page->records.back().name, 2);
  EXPECT_EQ(Names(rest->records), std::vector<std::string>{"other"});
  EXPECT_FALSE(rest->more);
}

TEST_P(RecordTableTest, CompareAndSwap) {
  const auto put = [&](std::optional<uint64_t> expected) {
    return table_->Put(kAlice, "n", "v", {.expected_revision = expected, .copy_of_revision = {}});
  };
  const uint64_t first = put(0).value();
  EXPECT_EQ(put(0).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(put(first + 1).status().code(), absl::StatusCode::kAborted);
  const uint64_t second = put(first).value();
  EXPECT_GT(second, first);
  EXPECT_THAT(std::string(put(first).status().message()), ::testing::HasSubstr(std::to_string(second)));
  EXPECT_GT(put(std::nullopt).value(), second);
  EXPECT_EQ(table_->Delete(kAlice, "n", second).code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(table_->Delete(kAlice, "n", std::nullopt).ok());
  EXPECT_EQ(table_->Delete(kAlice, "n", std::nullopt).code(), absl::StatusCode::kNotFound);
}

// A record that was deleted and made again is another one, and so is one after a restart.
TEST_P(RecordTableTest, RevisionsAreNeverUsedAgain) {
  const uint64_t first = table_->Put(kAlice, "n", "v", {}).value();
  ASSERT_TRUE(table_->Delete(kAlice, "n", first).ok());
  Open();
  const uint64_t again = table_->Put(kAlice, "n", "v", {}).value();
  EXPECT_GT(again, first);
  EXPECT_EQ(table_->Delete(kAlice, "n", first).code(), absl::StatusCode::kAborted);
}

TEST_P(RecordTableTest, CopiesKeepTheirRevisionAndNeverReplaceNewerOnes) {
  const auto copy = [&](uint64_t revision, const std::string& value) {
    return table_->Put(kAlice, "n", value, {.expected_revision = {}, .copy_of_revision = revision});
  };
  EXPECT_EQ(copy(100, "new").value(), 100u);
  EXPECT_EQ(copy(90, "old").value(), 100u);
  EXPECT_EQ(table_->Get(kAlice, "n")->value, "new");
  EXPECT_GT(table_->Put(kAlice, "n", "own", {.expected_revision = 100, .copy_of_revision = {}}).value(), 100u);
  EXPECT_EQ(copy(0, "").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(RecordTableTest, NamesAndValuesAreBounded) {
  EXPECT_EQ(table_->Put(kAlice, "", "v", {}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(table_->Put(kAlice, std::string(513, 'n'), "v", {}).status().code(), absl::StatusCode::kInvalidArgument);
  const std::string largest(kMaxRecordValueBytes, 'v');
  EXPECT_TRUE(table_->Put(kAlice, std::string(512, 'n'), largest, {}).ok());
  EXPECT_EQ(table_->Put(kAlice, "n", largest + "v", {}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(table_->Get(kAlice, std::string(512, 'n'))->value, largest);
}

// Of writers that all saw the same revision exactly one wins.
TEST_P(RecordTableTest, OneOfManyWritersWins) {
  uint64_t revision = table_->Put(kAlice, "n", "start", {}).value();
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> wins{0};
    std::vector<std::thread> writers;
    for (int i = 0; i < 4; ++i) {
      writers.emplace_back([&, i] {
        wins +=
            table_->Put(kAlice, "n", std::to_string(i), {.expected_revision = revision, .copy_of_revision = {}}).ok();
      });
    }
    for (std::thread& writer : writers) writer.join();
    EXPECT_EQ(wins, 1);
    revision = table_->Get(kAlice, "n")->revision;
  }
}

INSTANTIATE_TEST_SUITE_P(Storages, RecordTableTest, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "Disk" : "Memory"; });

TEST(RecordStorage, DiskKeepsRecordsBesideChunksAndNamespaces) {
  TempDir dir;
  FakeClock clock;
  IndexEntry entry;
  entry.key.bytes[0] = 7;
  const NamespaceRow row{.id = kAlice, .incarnation = 3, .created_ms = 1, .settings = {}};
  {
    const auto index = DiskIndex::Open(dir.path() + "/index").value();
    ASSERT_TRUE(index->Add({&entry, 1}).ok());
    ASSERT_TRUE(index->SaveNamespace(row).ok());
    const auto table = RecordTable::Open(*index, true, clock).value();
    ASSERT_TRUE(table->Put(kAlice, "n", "kept", {}).ok());
  }
  const auto index = DiskIndex::Open(dir.path() + "/index").value();
  const auto loaded = index->Load();
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->entries.size(), 1u);
  EXPECT_EQ(loaded->namespaces.size(), 1u);
  EXPECT_EQ(loaded->num_unreadable, 0u);
  EXPECT_EQ(RecordTable::Open(*index, true, clock).value()->Get(kAlice, "n")->value, "kept");
}

TEST(RecordStorage, ADamagedRowIsDataLossAndNoCrash) {
  FakeClock clock;
  const auto storage = MakeMemoryRecordStorage(1 << 20);
  const std::string key = std::string(reinterpret_cast<const char*>(kAlice.data()), 32) + "n";
  for (const std::string& row : {std::string(), std::string("\1short"), std::string("\2") + std::string(40, 'x')}) {
    ASSERT_TRUE(storage->SaveRecord(key, row, 1).ok());
    const auto table = RecordTable::Open(*storage, false, clock).value();
    EXPECT_EQ(table->Get(kAlice, "n").status().code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(table->List(kAlice, "", "", 0).status().code(), absl::StatusCode::kDataLoss);
  }
}

TEST(RecordStorage, MemoryIsBounded) {
  FakeClock clock;
  const auto storage = MakeMemoryRecordStorage(10'000);
  const auto table = RecordTable::Open(*storage, false, clock).value();
  const std::string value(4'000, 'v');
  ASSERT_TRUE(table->Put(kAlice, "a", value, {}).ok());
  ASSERT_TRUE(table->Put(kAlice, "b", value, {}).ok());
  EXPECT_TRUE(table->Put(kAlice, "b", value, {}).ok()) << "replacing takes no more room";
  EXPECT_EQ(table->Put(kAlice, "c", value, {}).status().code(), absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE(table->Delete(kAlice, "a", std::nullopt).ok());
  EXPECT_TRUE(table->Put(kAlice, "c", value, {}).ok());
}

}  // namespace
}  // namespace spl::kvstore
