#include "services/base/json_field.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/cord.h"
#include "services/base/field_error.h"
#include "services/base/json_object_reader.h"
#include "services/base/json_parser.h"

namespace spl {
namespace {

using nlohmann::json;

std::string PathOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kFieldPayload);
  return payload.has_value() ? std::string(*payload) : "";
}

TEST(JsonFieldTest, AnErrorSaysPathWhatItMustBeAndWhatItWas) {
  const json root = ParseJsonObject(R"({"a":{"b":[1,"x",true,null,2.5]}})", "f.json").value();
  const JsonField field = JsonField{&root, "f.json: "}.Require("a")->Require("b").value();
  EXPECT_EQ(field.CheckObject().message(), "f.json: a.b: must be an object, got a list");
  EXPECT_EQ(PathOf(field.CheckObject()), "f.json: a.b");
  EXPECT_EQ(field.At(0).String().status().message(), "f.json: a.b[0]: must be a string, got 1");
  EXPECT_EQ(field.At(1).Int(0, 5).status().message(),
            "f.json: a.b[1]: must be an integer between 0 and 5, got a string");
  EXPECT_EQ(field.At(2).Number().status().message(), "f.json: a.b[2]: must be a number, got true");
  EXPECT_EQ(field.At(3).Bool().status().message(), "f.json: a.b[3]: must be true or false, got null");
  EXPECT_EQ(field.At(4).Uint(9).status().message(), "f.json: a.b[4]: must be an integer between 0 and 9, got 2.5");
  EXPECT_EQ((JsonField{&root, "f.json: "}.Require("c").status().message()), "f.json: c: is missing");
}

TEST(JsonFieldTest, IntegersAreExactAtTheirLimits) {
  const json list = json::parse(
      R"([-9223372036854775808, 9223372036854775807, 9223372036854775808, 18446744073709551615, 3.0, -3.0, -0.0, 1e300])");
  const JsonField field{&list, ""};
  EXPECT_EQ(field.At(0).Int(INT64_MIN, INT64_MAX).value(), INT64_MIN);
  EXPECT_EQ(field.At(1).Int(INT64_MIN, INT64_MAX).value(), INT64_MAX);
  EXPECT_FALSE(field.At(2).Int(INT64_MIN, INT64_MAX).ok());
  EXPECT_EQ(field.At(3).Uint(UINT64_MAX).value(), UINT64_MAX);
  EXPECT_EQ(field.At(4).Int(0, 3).value(), 3);
  EXPECT_EQ(field.At(5).Int(-3, 3).value(), -3);
  EXPECT_FALSE(field.At(5).Uint(3).ok());
  EXPECT_EQ(field.At(6).Uint(3).value(), 0u);
  EXPECT_FALSE(field.At(7).Int(INT64_MIN, INT64_MAX).ok());
}

TEST(JsonObjectReaderTest, ReadsAFileAndKeepsTheFirstError) {
  const json root = json::parse(R"({"i":7,"d":-1,"s":"x","o":{"n":"?"},"l":{},"null":null})");
  JsonObjectReader reader(root, "f.json: ");
  EXPECT_EQ(reader.RequireInt("i", 1, 10), 7);
  EXPECT_EQ(reader.IntOr("absent", 1, 10, 5), 5);
  EXPECT_EQ(reader.IntOr("null", 1, 10, 5), 5);
  EXPECT_EQ(reader.StringOr("s", ""), "x");
  EXPECT_TRUE(reader.status().ok());
  EXPECT_EQ(reader.PositiveOr("d", 2.0), 2.0);
  EXPECT_EQ(reader.status().message(), "f.json: d: must be a positive number, got -1");
  EXPECT_EQ(reader.RequireInt("gone", 3, 10), 3);
  EXPECT_EQ(reader.List("l"), nullptr);
  EXPECT_EQ(PathOf(reader.status()), "f.json: d");
  JsonObjectReader inner(*reader.Object("o"), reader.path() + "o.");
  EXPECT_EQ(inner.RequireInt("n", 1, 2), 1);
  EXPECT_EQ(inner.status().message(), "f.json: o.n: must be an integer between 1 and 2, got a string");
  JsonObjectReader missing(root, "f.json: ");
  missing.RequireInt("gone", 3, 10);
  EXPECT_EQ(missing.status().message(), "f.json: gone: is missing");
  JsonObjectReader no_object(root["s"], "f.json: s.");
  EXPECT_EQ(no_object.status().message(), "f.json: s: must be an object, got a string");
}

TEST(ParseJsonObjectTest, TheLastOfTwoNamesCountsAndErrorsNameTheFile) {
  EXPECT_EQ(ParseJsonObject(R"({"a":1,"a":2})", "f.json").value()["a"], 2);
  EXPECT_EQ(ParseJsonObject("[]", "f.json").status().message(), "f.json: must be an object, got a list");
  EXPECT_THAT(std::string(ParseJsonObject("{", "f.json").status().message()),
              testing::StartsWith("f.json: is not JSON"));
  EXPECT_FALSE(ParseJsonObject("{\"a\":1e999}", "f.json").ok());
}

}  // namespace
}  // namespace spl
