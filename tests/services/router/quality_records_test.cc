// What a router remembers of the verdicts in receipts.
#include "services/router/telemetry/quality_records.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "services/methods/quality.h"

namespace spl::router {
namespace {

using namespace std::chrono_literals;

constexpr chunk::Digest kDocs{1}, kMail{2};
const SteadyTime kStart = SteadyTime(1000s);

QualityRecord Said(std::string_view worker, std::string_view method, std::string_view why, SteadyTime when = kStart) {
  QualityRecord record{.worker = std::string(worker), .seen = when};
  record.choice.set_method(std::string(method));
  record.choice.set_why(std::string(why));
  return record;
}

TEST(QualityRecordsTest, TheLastWordOfAnyWorkerCounts) {
  QualityRecords records;
  EXPECT_FALSE(records.IsClearlyBad(kDocs, "splice", kStart));
  records.Observe(kDocs, Said("p0", "splice", "default"));
  records.Observe(kDocs, Said("p1", "splice", methods::kClearlyBad));
  EXPECT_TRUE(records.IsClearlyBad(kDocs, "splice", kStart));
  EXPECT_FALSE(records.IsClearlyBad(kDocs, "splic", kStart));
  EXPECT_FALSE(records.IsClearlyBad(kDocs, "sparsex", kStart)) << "another method";
  EXPECT_FALSE(records.IsClearlyBad(kMail, "splice", kStart)) << "another namespace";
  records.Observe(kDocs, Said("p1", "splice", methods::kSameContext));
  EXPECT_TRUE(records.IsClearlyBad(kDocs, "splice", kStart)) << "another record, of copies that are not recovered";
  // A prompt without copies says nothing of the method.
  records.Observe(kDocs, Said("p1", "splice", methods::kLittleToGain));
  records.Observe(kDocs, Said("p1", "exact", methods::kNothingToCopy));
  EXPECT_TRUE(records.IsClearlyBad(kDocs, "splice", kStart));
  records.Observe(kDocs, Said("p1", "splice", "default"));
  EXPECT_FALSE(records.IsClearlyBad(kDocs, "splice", kStart)) << "its record is better now";
  EXPECT_EQ(records.All().size(), 3u);
}

TEST(QualityRecordsTest, AVerdictThatNobodyConfirmsIsForgotten) {
  QualityRecords records;
  records.Observe(kDocs, Said("p0", "splice", methods::kClearlyBad));
  EXPECT_TRUE(records.IsClearlyBad(kDocs, "splice", kStart + QualityRecords::kVerdictAge - 1s));
  EXPECT_FALSE(records.IsClearlyBad(kDocs, "splice", kStart + QualityRecords::kVerdictAge));
  records.Observe(kDocs, Said("p0", "splice", methods::kClearlyBad, kStart + 9min));
  EXPECT_TRUE(records.IsClearlyBad(kDocs, "splice", kStart + 15min));
}

TEST(QualityRecordsTest, TheLeastRecentlySeenGoesFirst) {
  QualityRecords records(2);
  records.Observe(kDocs, Said("p0", "splice", methods::kClearlyBad));
  records.Observe(kMail, Said("p0", "splice", methods::kClearlyBad));
  records.Observe(kDocs, Said("p0", "splice", methods::kClearlyBad));
  records.Observe(kDocs, Said("p0", "sparsex", "default"));
  EXPECT_TRUE(records.IsClearlyBad(kDocs, "splice", kStart));
  EXPECT_FALSE(records.IsClearlyBad(kMail, "splice", kStart));
  const std::vector<QualityRecord> all = records.All();
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].choice.method(), "sparsex");
}

}  // namespace
}  // namespace spl::router
