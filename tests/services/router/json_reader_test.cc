#include "services/router/request/json_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "services/router/request/api_error.h"

namespace spl::router {
namespace {

using ::testing::HasSubstr;

TEST(ParseJsonTest, TakesWhatJsonAllows) {
  const Json json = ParseJson(R"( {"a":[1,-2,3.5,true,null,"x\u00e9"],"b":{"c":{}}} )").value();
  EXPECT_EQ(json.dump(), R"({"a":[1,-2,3.5,true,null,"xé"],"b":{"c":{}}})");
}

TEST(ParseJsonTest, RefusesWhatIsNotJson) {
  for (const char* text :
       {"", " ", "{", "{\"a\":}", "{\"a\":1,}", "nul", "[1 2]", "{} x", "{'a':1}", "\"\xff\"", "NaN", "01"}) {
    EXPECT_EQ(ParseJson(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(ParseJsonTest, NestingIsBounded) {
  const auto nested = [](int depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_TRUE(ParseJson(nested(kMaxJsonDepth)).ok());
  EXPECT_THAT(ParseJson(nested(kMaxJsonDepth + 1)).status().ToString(), HasSubstr("nested deeper"));
  EXPECT_FALSE(ParseJson(std::string(1 << 20, '[')).ok());
}

TEST(ParseJsonTest, DuplicateNamesAreRefusedAtAnyDepth) {
  EXPECT_EQ(ParamOf(ParseJson(R"({"a":1,"a":2})").status()), "a");
  EXPECT_EQ(ParamOf(ParseJson(R"({"x":[{"b":1,"c":{"d":1,"d":1}}]})").status()), "d");
  EXPECT_TRUE(ParseJson(R"({"a":{"a":{"a":1}},"b":[{"a":1},{"a":2}]})").ok());
}

TEST(ParseJsonTest, NumbersThatFitNowhereAreRefused) {
  EXPECT_THAT(ParseJson("1e999").status().ToString(), HasSubstr("out of range"));
  EXPECT_TRUE(ParseJson("123456789012345678901234567890").ok());  // as a double
}

TEST(ObjectReaderTest, ReadsTypesAndNullMeansAbsent) {
  const Json json = ParseJson(R"({"b":true,"s":"x","u":3.0,"f":2,"seed":-1,"l":["a"],"t":[1,2],"z":null})").value();
  ObjectReader reader(json, "");
  bool b = false;
  std::string s;
  std::optional<uint64_t> u;
  float f = 0;
  std::optional<uint64_t> seed;
  std::vector<std::string> l;
  std::vector<uint32_t> t;
  std::optional<uint64_t> z;
  reader.Bool("b", &b);
  reader.String("s", &s);
  reader.Uint("u", 10, &u);
  reader.Float("f", &f);
  reader.Seed("seed", &seed);
  reader.StringOrList("l", &l);
  reader.TokenIds("t", &t);
  reader.Uint("z", 10, &z);
  EXPECT_TRUE(reader.Finish().ok());
  EXPECT_TRUE(b);
  EXPECT_EQ(s, "x");
  EXPECT_EQ(u, 3u);
  EXPECT_EQ(f, 2.0F);
  EXPECT_EQ(seed, UINT64_MAX);
  EXPECT_EQ(l, std::vector<std::string>{"a"});
  EXPECT_EQ(t, (std::vector<uint32_t>{1, 2}));
  EXPECT_FALSE(z.has_value());
}

TEST(ObjectReaderTest, FirstComplaintWinsAndNamesThePath) {
  const Json json = ParseJson(R"({"a":"x","b":"y"})").value();
  ObjectReader reader(json, "outer.");
  bool value = false;
  reader.Bool("a", &value);
  reader.Bool("b", &value);
  EXPECT_EQ(ParamOf(reader.Finish()), "outer.a");
}

TEST(ObjectReaderTest, UnknownFieldIsNamed) {
  const Json json = ParseJson(R"({"a":1,"zz":2})").value();
  ObjectReader reader(json, "");
  reader.Ignore({"a"});
  EXPECT_EQ(ParamOf(reader.Finish()), "zz");
  EXPECT_EQ(ErrorCodeOf(reader.Finish()), "unknown_field");
}

TEST(ObjectReaderTest, UnknownFieldsMayBeListed) {
  const Json json = ParseJson(R"({"a":1,"zz":2,"null":null,"b":{}})").value();
  ObjectReader reader(json, "outer.");
  reader.Ignore({"a"});
  std::vector<std::string> ignored;
  EXPECT_TRUE(reader.FinishIgnoring(&ignored).ok());
  EXPECT_EQ(ignored, (std::vector<std::string>{"outer.zz", "outer.b"}));
  EXPECT_TRUE(reader.FinishIgnoring(nullptr).ok());
  ObjectReader wrong(json, "outer.");
  wrong.RefuseAny({"b"});
  EXPECT_EQ(ParamOf(wrong.FinishIgnoring(nullptr)), "outer.b");
}

// Names are looked up among all before them: that must not take a time that grows with the square.
TEST(ParseJsonTest, WideObjectsAreReadInLinearTime) {
  std::string text = "{";
  for (int i = 0; i < 300'000; ++i) text += (i > 0 ? ",\"k" : "\"k") + std::to_string(i) + "\":1";
  EXPECT_EQ(ParseJson(text + "}")->size(), 300'000u);
  EXPECT_FALSE(ParseJson(text + ",\"k7\":1}").ok());
}

TEST(ParseJsonTest, MembersKeepTheirOrder) {
  EXPECT_EQ(ParseJson(R"({"b":1,"a":{"d":1,"c":2}})")->dump(), R"({"b":1,"a":{"d":1,"c":2}})");
}

TEST(ObjectReaderTest, RefusedFieldsMayBeEmpty) {
  const Json json = ParseJson(R"({"a":null,"b":false,"c":[],"d":{},"e":0})").value();
  ObjectReader fine(json, "");
  fine.Refuse({"a", "b", "c", "d"});
  fine.Ignore({"e"});
  EXPECT_TRUE(fine.Finish().ok());
  ObjectReader refused(json, "");
  refused.Ignore({"a", "b", "c", "d"});
  refused.Refuse({"e"});
  EXPECT_EQ(ParamOf(refused.Finish()), "e");
}

TEST(ObjectReaderTest, IntegersAreExact) {
  for (const char* text : {"-1", "1.5", "11", "1e30", "18446744073709551616", "\"3\"", "true", "[]"}) {
    const Json json = ParseJson(std::string(R"({"u":)") + text + "}").value();
    ObjectReader reader(json, "");
    std::optional<uint64_t> u;
    reader.Uint("u", 10, &u);
    EXPECT_EQ(ParamOf(reader.Finish()), "u") << text;
  }
}

}  // namespace
}  // namespace spl::router
