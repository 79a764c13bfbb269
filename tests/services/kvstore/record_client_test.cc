// Records and namespaces over several real stores, of which some go away.
#include "services/chunk/remote/record_client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "services/chunk/remote/namespace_client.h"
#include "services/kvstore/kvstore_server.h"
#include "tests/support/temp_dir.h"

namespace spl::kvstore {
namespace {

using chunk::NamespaceClient;
using chunk::RecordClient;
using testing::TempDir;

std::chrono::steady_clock::time_point Soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(20); }

chunk::Digest Owner(uint8_t n) {
  chunk::Digest owner{};
  owner.fill(n);
  return owner;
}

// Two stores that can be stopped and started again at their addresses.
class RecordClientTest : public ::testing::Test {
 protected:
  RecordClientTest() {
    for (int i = 0; i < 2; ++i) Start(i);
    const std::string both = addresses_[0] + "," + addresses_[1];
    records_ = std::move(RecordClient::Connect(both)).value();
    namespaces_ = std::move(NamespaceClient::Connect(both)).value();
  }
  void Start(int i) {
    KvStoreOptions options;
    options.listen = addresses_[i];
    options.metrics_listen = "";
    options.data_dir = dir_.path() + "/" + std::to_string(i);
    options.memory_bytes = 1 << 20;
    options.disk_bytes = 64 << 20;
    auto server = KvStoreServer::Start(options);
    ASSERT_TRUE(server.ok()) << server.status();
    stores_[i] = *std::move(server);
    addresses_[i] = stores_[i]->grpc_address();
  }
  // The clients' channels find a store again within a second.
  void StartAgain(int i) {
    Start(i);
    const auto reached = [&] {
      return records_->Delete(Owner(255), "none", std::nullopt, Soon()).code() == absl::StatusCode::kNotFound &&
             namespaces_->List("nobody", Soon()).ok();
    };
    const auto deadline = Soon();
    while (!reached() && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  }
  // Which store decides for an owner: the one without which nothing can be put.
  int FirstOf(const chunk::Digest& owner) {
    EXPECT_TRUE(records_->Put(owner, "probe", "1", {}, Soon()).ok());
    stores_[1].reset();
    const bool first_is_0 = records_->Put(owner, "probe", "2", {}, Soon()).ok();
    StartAgain(1);
    return first_is_0 ? 0 : 1;
  }

  TempDir dir_;
  std::string addresses_[2] = {"127.0.0.1:0", "127.0.0.1:0"};
  std::unique_ptr<KvStoreServer> stores_[2];
  std::unique_ptr<RecordClient> records_;
  std::unique_ptr<NamespaceClient> namespaces_;
};

TEST_F(RecordClientTest, PutGetListDeleteAndSwap) {
  const auto owner = Owner(1);
  const uint64_t first = records_->Put(owner, "kb/a", "one", {.expected_revision = 0}, Soon()).value();
  EXPECT_EQ(records_->Put(owner, "kb/a", "no", {.expected_revision = 0}, Soon()).status().code(),
            absl::StatusCode::kAborted);
  ASSERT_TRUE(records_->Put(owner, "kb/a", "two", {.expected_revision = first}, Soon()).ok());
  ASSERT_TRUE(records_->Put(owner, "kb/b", std::string(16 << 20, 'b'), {}, Soon()).ok()) << "the largest value";
  EXPECT_EQ(records_->Get(owner, "kb/a", Soon())->value, "two");
  EXPECT_EQ(records_->Get(owner, "kb/b", Soon())->value.size(), size_t{16} << 20);
  EXPECT_EQ(records_->Get(Owner(2), "kb/a", Soon()).status().code(), absl::StatusCode::kNotFound);
  const auto listed = records_->List(owner, "kb/", Soon());
  ASSERT_TRUE(listed.ok()) << listed.status();
  ASSERT_EQ(listed->size(), 2u);
  EXPECT_EQ((*listed)[1].value_bytes, uint64_t{16} << 20);
  EXPECT_EQ(records_->Delete(owner, "kb/a", first, Soon()).code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(records_->Delete(owner, "kb/a", std::nullopt, Soon()).ok());
  EXPECT_EQ(records_->Get(owner, "kb/a", Soon()).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(RecordClientTest, ListsMoreThanOnePage) {
  for (int i = 0; i < 1100; ++i) {
    ASSERT_TRUE(records_->Put(Owner(1), "n" + std::to_string(1000 + i), "v", {}, Soon()).ok());
  }
  const auto listed = records_->List(Owner(1), "n", Soon());
  ASSERT_TRUE(listed.ok()) << listed.status();
  ASSERT_EQ(listed->size(), 1100u);
  EXPECT_EQ(listed->back().name, "n2099");
}

// With the first choice away everything can be read and nothing changed; it is not two truths afterwards.
TEST_F(RecordClientTest, TheCopyServesReadsAndOnlyReads) {
  for (uint8_t n = 1; n <= 4; ++n) {
    const auto owner = Owner(n);
    const int first = FirstOf(owner);
    ASSERT_TRUE(records_->Put(owner, "kb/a", "value", {}, Soon()).ok());
    stores_[first].reset();
    EXPECT_EQ(records_->Get(owner, "kb/a", Soon())->value, "value");
    EXPECT_EQ(records_->List(owner, "kb/", Soon())->size(), 1u);
    const absl::Status put = records_->Put(owner, "kb/a", "other", {}, Soon()).status();
    EXPECT_EQ(put.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(put.message()), ::testing::HasSubstr(addresses_[first]));
    EXPECT_EQ(records_->Get(owner, "kb/b", Soon()).status().code(), absl::StatusCode::kUnavailable)
        << "the copy's word is not enough to say that there is none";
    StartAgain(first);
    EXPECT_EQ(records_->Get(owner, "kb/a", Soon())->value, "value") << "durable";
  }
}

TEST_F(RecordClientTest, ADeletionNeedsBoth) {
  const auto owner = Owner(3);
  const int first = FirstOf(owner);
  ASSERT_TRUE(records_->Put(owner, "kb/a", "value", {}, Soon()).ok());
  for (const int away : {first, 1 - first}) {
    stores_[away].reset();
    EXPECT_EQ(records_->Delete(owner, "kb/a", std::nullopt, Soon()).code(), absl::StatusCode::kUnavailable) << away;
    StartAgain(away);
    EXPECT_EQ(records_->Get(owner, "kb/a", Soon())->value, "value") << away;
  }
  ASSERT_TRUE(records_->Delete(owner, "kb/a", std::nullopt, Soon()).ok());
  stores_[first].reset();
  EXPECT_EQ(records_->Get(owner, "kb/a", Soon()).status().code(), absl::StatusCode::kUnavailable) << "and not found";
}

// A member joins and becomes the first choice of some owners: their records follow when they are read.
TEST_F(RecordClientTest, RecordsFollowTheirOwnersToANewMember) {
  const auto alone = std::move(RecordClient::Connect(addresses_[0])).value();
  int moved = 0;
  for (uint8_t n = 1; n <= 6; ++n) {
    const uint64_t revision = alone->Put(Owner(n), "kb/a", "value", {}, Soon()).value();
    EXPECT_EQ(records_->List(Owner(n), "", Soon())->size(), 1u);
    ASSERT_EQ(records_->Get(Owner(n), "kb/a", Soon())->value, "value");
    const auto put = records_->Put(Owner(n), "kb/a", "next", {.expected_revision = revision}, Soon());
    ASSERT_TRUE(put.ok()) << put.status();
    EXPECT_GT(*put, revision);
    const auto joined = std::move(RecordClient::Connect(addresses_[1])).value();
    moved += joined->Get(Owner(n), "kb/a", Soon()).ok();
    EXPECT_EQ(records_->Get(Owner(n), "kb/a", Soon())->value, "next");
  }
  EXPECT_EQ(moved, 6) << "as the first choice or as the copy";
}

TEST(RecordClient, DurableIsRefusedWithoutADisk) {
  KvStoreOptions options;
  options.metrics_listen = "";
  const auto store = std::move(KvStoreServer::Start(options)).value();
  const auto records = std::move(RecordClient::Connect(store->grpc_address())).value();
  EXPECT_EQ(records->Put(Owner(1), "n", "v", {}, Soon()).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(records->Put(Owner(1), "n", "v", {.expected_revision = {}, .durable = false}, Soon()).ok());
  EXPECT_FALSE(RecordClient::Connect("nonsense").ok());
  EXPECT_FALSE(RecordClient::Connect("127.0.0.1:1,127.0.0.1:1").ok());
}

TEST_F(RecordClientTest, NamespacesAreOnAllMembers) {
  const auto id = Owner(9);
  EXPECT_EQ(namespaces_->Stat(id, Soon()).status().code(), absl::StatusCode::kNotFound);
  const auto made = namespaces_->Create(id, {.name = "docs", .owner = "alice", .quota_bytes = 5}, Soon());
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_FALSE(made->implicit);
  EXPECT_EQ(namespaces_->Create(id, {}, Soon()).status().code(), absl::StatusCode::kAlreadyExists);
  for (const std::string& address : addresses_) {
    const auto one = std::move(NamespaceClient::Connect(address)).value();
    EXPECT_EQ(one->Stat(id, Soon())->settings.quota_bytes, 5u);
    ASSERT_EQ(one->List("alice", Soon())->size(), 1u);
  }
  EXPECT_EQ(namespaces_->Set(id, {.name = "docs", .owner = "alice", .quota_bytes = 6}, Soon())->settings.quota_bytes,
            6u);
  EXPECT_EQ(namespaces_->List("bob", Soon())->size(), 0u);
  ASSERT_TRUE(std::move(NamespaceClient::Connect(addresses_[1])).value()->Delete(id, Soon()).ok());
  EXPECT_EQ(namespaces_->Set(id, {.name = "docs", .owner = "alice"}, Soon())->settings.owner, "alice");
  EXPECT_EQ(std::move(NamespaceClient::Connect(addresses_[1])).value()->List("alice", Soon())->size(), 1u)
      << "a member without it gets it";
  stores_[1].reset();
  EXPECT_EQ(namespaces_->Delete(id, Soon()).status().code(), absl::StatusCode::kUnavailable);
  StartAgain(1);
  EXPECT_TRUE(namespaces_->Delete(id, Soon()).ok());
  EXPECT_EQ(namespaces_->Delete(id, Soon()).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace spl::kvstore
