// Which method a prompt gets, by what there is to copy and by the records, and why.
#include "services/engine/methods/method_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

namespace spl::engine {
namespace {

class FakeRecords final : public AgreementSource {
 public:
  explicit FakeRecords(std::map<std::string, Agreement, std::less<>> records) : records_(std::move(records)) {}
  Agreement Of(const chunk::Digest&, std::string_view method) const override {
    const auto found = records_.find(method);
    return found == records_.end() ? Agreement() : found->second;
  }
  double provable() const override { return 0.996; }

 private:
  const std::map<std::string, Agreement, std::less<>> records_;
};

Agreement Seen(double weight, double share) {
  return {weight, share, WilsonLow(share, weight), WilsonHigh(share, weight)};
}

const Candidate kSparse{.policy = "sparsex", .record = "S", .work = 0.4};
const Candidate kFewer{.policy = "samkv", .record = "K", .work = 0.5, .needs_record = true};
const Candidate kAsItIs{.policy = "sparsex", .record = "C", .work = 0.1, .same_context = true};
const Candidate kDear{.policy = "sparsex", .record = "S", .work = 0.91};

struct Case {
  const char* name;
  std::vector<Candidate> candidates;
  double quality;
  std::map<std::string, Agreement, std::less<>> records;
  const char* policy;
  const char* why;
  const char* measured;  // beside, by a request that was drawn
};

TEST(MethodChoiceTest, Table) {
  const Case cases[] = {
      {"no copies", {}, 0, {}, "exact", "nothing_to_copy", ""},
      {"no copies, contract", {}, 0.9, {}, "exact", "nothing_to_copy", ""},
      {"too dear", {kDear}, 0, {}, "exact", "little_to_gain", ""},
      {"too dear with the best record", {kDear}, 0.9, {{"S", Seen(700, 1)}}, "exact", "little_to_gain", ""},
      {"same context", {kAsItIs}, 0, {}, "sparsex", "same_context", ""},
      {"the model's method", {kSparse}, 0, {}, "sparsex", "default", ""},
      {"many documents, no record", {kFewer, kSparse}, 0, {}, "sparsex", "default", "samkv"},
      {"many documents, good", {kFewer, kSparse}, 0, {{"K", Seen(300, 0.99)}}, "samkv", "record", ""},
      {"many documents, so so", {kFewer, kSparse}, 0, {{"K", Seen(300, 0.91)}}, "sparsex", "default", "samkv"},
      {"not so good", {kSparse}, 0, {{"S", Seen(300, 0.89)}}, "sparsex", "default", ""},
      {"clearly bad", {kSparse}, 0, {{"S", Seen(300, 0.8)}}, "exact", "clearly_bad", "sparsex"},
      {"clearly bad, the other good",
       {kFewer, kSparse},
       0,
       {{"S", Seen(300, 0.8)}, {"K", Seen(300, 0.99)}},
       "samkv",
       "record",
       ""},
      {"contract, nothing known", {kSparse}, 0.99, {}, "exact", "no_record", "sparsex"},
      {"one comparison too few", {kSparse}, 0.99, {{"S", Seen(267, 1)}}, "exact", "no_record", "sparsex"},
      {"just enough", {kSparse}, 0.99, {{"S", Seen(268, 1)}}, "sparsex", "record", ""},
      {"contract not met", {kSparse}, 0.99, {{"S", Seen(700, 0.98)}}, "exact", "below_quality", "sparsex"},
      {"a smaller one is", {kSparse}, 0.9, {{"S", Seen(700, 0.98)}}, "sparsex", "record", ""},
      {"copies as they are need a record, too", {kAsItIs}, 0.9, {{"S", Seen(700, 1)}}, "exact", "no_record", "sparsex"},
      {"copies as they are, proven", {kAsItIs}, 0.9, {{"C", Seen(700, 1)}}, "sparsex", "record", ""},
      {"no record can", {kSparse}, 0.9999, {{"S", Seen(700, 1)}}, "exact", "unprovable", ""},
      // The one with fewer comparisons, so that none is forgotten.
      {"two unknown", {kFewer, kSparse}, 0.9, {{"K", Seen(3, 1)}}, "exact", "no_record", "sparsex"},
      {"two unknown, the other", {kFewer, kSparse}, 0.9, {{"S", Seen(3, 1)}}, "exact", "no_record", "samkv"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    MethodTerms terms{.choose = true, .quality = c.quality, .records = std::make_shared<FakeRecords>(c.records)};
    MethodChoice choice = ChooseMethod(c.candidates, terms, {});
    EXPECT_EQ(choice.policy, c.policy);
    EXPECT_EQ(NameOf(choice.why), c.why);
    EXPECT_EQ(choice.record.empty(), choice.policy == "exact") << "exact is not compared";
    EXPECT_EQ(choice.measure, "") << "the request was not drawn";
    terms.compares = true;
    choice = ChooseMethod(c.candidates, terms, {});
    EXPECT_EQ(choice.policy, c.policy) << "the answer is never the experiment";
    EXPECT_EQ(choice.measure, c.measured);
  }
}

TEST(MethodChoiceTest, WithoutRecordsAContractIsExact) {
  const MethodTerms terms{.choose = true, .quality = 0.5};
  EXPECT_EQ(ChooseMethod({kSparse}, terms, {}).policy, "exact");
  EXPECT_EQ(ChooseMethod({kSparse}, {.choose = true}, {}).policy, "sparsex");
}

TEST(MethodChoiceTest, ANamedMethodIsHeldToItsContract) {
  const Candidate naive{.policy = "naive", .record = "N"};
  const auto choose = [&](const Agreement& agreement) {
    const MethodTerms terms{
        .quality = 0.9,
        .compares = true,
        .records = std::make_shared<FakeRecords>(std::map<std::string, Agreement, std::less<>>{{"N", agreement}})};
    return HoldToContract(naive, terms, {});
  };
  EXPECT_EQ(choose({}).policy, "exact");
  EXPECT_EQ(choose({}).measure, "naive");
  EXPECT_EQ(choose({}).judged, "naive") << "the reason is about it";
  EXPECT_EQ(choose(Seen(500, 0.99)).policy, "naive");
  EXPECT_EQ(choose(Seen(500, 0.99)).measure, "");
  EXPECT_EQ(choose(Seen(500, 0.85)).why, ChoiceReason::kBelowQuality);
}

// Numbers of a table of Wilson's interval, z = 1.6449.
TEST(MethodChoiceTest, WilsonsBounds) {
  EXPECT_NEAR(WilsonLow(0.95, 100), 0.90084, 1e-5);
  EXPECT_NEAR(WilsonHigh(0.95, 100), 0.97545, 1e-5);
  EXPECT_NEAR(WilsonLow(0.5, 20), 0.32740, 1e-5);
  EXPECT_NEAR(WilsonHigh(0.5, 20), 0.67260, 1e-5);
  EXPECT_NEAR(WilsonLow(0, 10), 0, 1e-12);
  EXPECT_NEAR(WilsonHigh(0, 10), 0.21294, 1e-5);
  EXPECT_GE(WilsonLow(1, 268), 0.99);
  EXPECT_LT(WilsonLow(1, 267), 0.99);
  EXPECT_EQ(WilsonLow(0, 0), 0);
  EXPECT_EQ(WilsonHigh(0, 0), 1);
}

}  // namespace
}  // namespace spl::engine
