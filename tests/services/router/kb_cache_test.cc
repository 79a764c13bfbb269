// The current versions that a router keeps, over records that fail in every way.
#include "services/router/kb/kb_cache.h"

#include <gtest/gtest.h>

#include <mutex>

#include "services/base/log.h"

namespace spl::router {
namespace {

constexpr chunk::Digest kOwner{1};

// One knowledge base "b" with version 1, or an error for every read.
class FakeRecords final : public chunk::RecordClient {
 public:
  FakeRecords() {
    KbVersion version;
    version.version = 1;
    version.state = KbState::kReady;
    version.uid = "u";
    version.model_fingerprint = std::string(64, '0');
    head_.name = "b";
    head_.current = 1;
    head_.next_version = 2;
    head_.versions.push_back(version);
    content_.uid = "u";
    content_.documents.push_back({.id = "x", .text = "text", .sha256 = Sha256Hex("text")});
  }
  void FailWith(absl::Status status) {
    std::lock_guard lock(mutex_);
    failure_ = std::move(status);
  }

  absl::StatusOr<chunk::StoredRecord> Get(const chunk::Digest&, const std::string& name, Deadline) override {
    std::lock_guard lock(mutex_);
    if (!failure_.ok()) return failure_;
    if (name == KbHeadRecord("b")) return chunk::StoredRecord{.name = name, .revision = 7, .value = ToJson(head_)};
    if (name == KbContentRecord("b", 1)) {
      return chunk::StoredRecord{.name = name, .revision = 1, .value = ToJson(content_)};
    }
    return absl::NotFoundError("no such record");
  }
  absl::StatusOr<uint64_t> Put(const chunk::Digest&, const std::string&, const std::string&, const PutOptions&,
                               Deadline) override {
    return absl::UnimplementedError("read only");
  }
  absl::Status Delete(const chunk::Digest&, const std::string&, std::optional<uint64_t>, Deadline) override {
    return absl::UnimplementedError("read only");
  }
  absl::StatusOr<std::vector<chunk::StoredRecord>> List(const chunk::Digest&, const std::string&, Deadline) override {
    return absl::UnimplementedError("read only");
  }

 private:
  std::mutex mutex_;  // guards failure_
  absl::Status failure_;
  KbHead head_;
  KbContent content_;
};

class KbCacheTest : public ::testing::TestWithParam<absl::StatusCode> {
 protected:
  KbCacheTest() {
    auto records = std::make_unique<FakeRecords>();
    records_ = records.get();
    store_ = std::make_unique<KbStore>(std::move(records), nullptr, std::chrono::seconds(20));
    KbCacheOptions options;
    // The test reads the store itself. Longer than a machine runs: a time of 0 is not long ago then.
    options.poll_interval = std::chrono::hours(24 * 365);
    cache_ = std::make_unique<KbCache>(*store_, options);
  }

  FakeRecords* records_;
  std::unique_ptr<KbStore> store_;
  std::unique_ptr<KbCache> cache_;
};

class Failures : public KbCacheTest {};

TEST_P(Failures, LeaveTheVersionThatIsKnown) {
  ASSERT_TRUE(cache_->Current(kOwner, "b").ok());
  log::SetLevel(log::Level::kInfo);
  ::testing::internal::CaptureStderr();  // first: the poller's first look may meet the failure before Refresh does
  records_->FailWith(absl::Status(GetParam(), "injected"));
  for (int i = 0; i < 2; ++i) {
    cache_->Refresh(kOwner, "b");
    const KbCache::Found found = cache_->Current(kOwner, "b");
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ((*found)->version, 1u);
  }
  // Nobody else says it, and it is said once.
  const std::string logged = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(logged.find("injected"), std::string::npos);
  EXPECT_EQ(logged.find("injected"), logged.rfind("injected")) << logged;
  EXPECT_FALSE(cache_->Current(kOwner, "unknown").ok());
  records_->FailWith(absl::OkStatus());
  cache_->Refresh(kOwner, "b");
  EXPECT_TRUE(cache_->Current(kOwner, "b").ok());
}

INSTANTIATE_TEST_SUITE_P(KbCache, Failures,
                         ::testing::Values(absl::StatusCode::kUnavailable, absl::StatusCode::kDeadlineExceeded,
                                           absl::StatusCode::kResourceExhausted, absl::StatusCode::kCancelled,
                                           absl::StatusCode::kInternal, absl::StatusCode::kUnauthenticated,
                                           absl::StatusCode::kDataLoss, absl::StatusCode::kUnknown),
                         [](const auto& info) { return absl::StatusCodeToString(info.param); });

class AnswersOfNone : public KbCacheTest {};

TEST_P(AnswersOfNone, EndTheVersionThatIsKnown) {
  ASSERT_TRUE(cache_->Current(kOwner, "b").ok());
  records_->FailWith(absl::Status(GetParam(), "injected"));
  cache_->Refresh(kOwner, "b");
  EXPECT_EQ(cache_->Current(kOwner, "b").status().code(), GetParam());
}

INSTANTIATE_TEST_SUITE_P(KbCache, AnswersOfNone,
                         ::testing::Values(absl::StatusCode::kNotFound, absl::StatusCode::kFailedPrecondition),
                         [](const auto& info) { return absl::StatusCodeToString(info.param); });

}  // namespace
}  // namespace spl::router
