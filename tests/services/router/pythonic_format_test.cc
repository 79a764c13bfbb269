#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "services/router/output_formats/python_calls.h"
#include "tests/services/router/output_format_cases.h"

namespace spl::router {
namespace {

TEST(PythonicFormatTest, Answers) {
  ExpectCases({.tools = "pythonic"},
              {{"one call",
                "[get_weather(city=\"Zürich\", days=3)]",
                {"", "", {"get_weather({\"city\": \"Zürich\", \"days\": 3})"}}},
               {"two calls",
                "[a(), b.c(x='])', y=[True, None, (1, 2.5)], z={'k': -1})]\n",
                {"", "", {"a({})", "b.c({\"x\": \"])\", \"y\": [true, null, [1, 2.5]], \"z\": {\"k\": -1}})"}}},
               {"between tags", "<|python_start|>[a(x=1)]<|python_end|>", {"", "", {"a({\"x\": 1})"}}},
               {"text around tags", "Ok. <|python_start|> [a()] <|python_end|> Done. ", {"", "Ok.Done. ", {"a({})"}}},
               {"tags twice",
                "<|python_start|>[a()]<|python_end|><|python_start|>[b()]<|python_end|>",
                {"", "", {"a({})", "b({})"}}},
               {"text behind", "[a()]\nDone.", {"", "Done.", {"a({})"}}},
               {"cut off in the end tag", "<|python_start|>[a()]<|python_e", {"", "", {"a({})"}}},
               {"no list in the tags",
                "x <|python_start|>print(1)<|python_end|>",
                {"", "x <|python_start|>print(1)<|python_end|>", {}}},
               {"text in front", "Call [a(x=1)]", {"", "Call [a(x=1)]", {}}},
               {"a list of numbers", "[1, 2] are numbers", {"", "[1, 2] are numbers", {}}},
               {"a list of names", "[a, b]", {"", "[a, b]", {}}},
               {"a link", "[a](http://b) c", {"", "[a](http://b) c", {}}},
               {"positions", "[a(1)]", {"", "[a(1)]", {}}},
               {"a variable", "[a(x=y)]", {"", "[a(x=y)]", {}}},
               {"one that is no call", "[a(), 1]", {"", "[a(), 1]", {}}},
               {"cut off", " [a(x=\"1", {"", " [a(x=\"1", {}}},
               {"cut off in tags", "x <|python_start|>[a(x=\"1", {"", "x <|python_start|>[a(x=\"1", {}}},
               {"not closed in tags",
                "<|python_start|>[a(x=1<|python_end|> y",
                {"", "<|python_start|>[a(x=1<|python_end|> y", {}}},
               {"an empty list", "[]", {"", "[]", {}}},
               {"white space", " \n", {"", " \n", {}}}});
}

std::string Arguments(const std::string& value) {
  const auto calls = ReadPythonCalls("[f(x=" + value + ")]");
  if (!calls.has_value()) return "none";
  EXPECT_TRUE(nlohmann::json::accept(calls->front().arguments)) << calls->front().arguments;
  return calls->front().arguments;
}

TEST(PythonicFormatTest, Literals) {
  EXPECT_EQ(Arguments("'it\\'s \"\\n\\x41\\u00e9\\U0001F600\\d'"), "{\"x\": \"it's \\\"\\nAé😀\\\\d\"}");
  EXPECT_EQ(Arguments("\"\\ud83d\\ude00\""), "{\"x\": \"😀\"}");
  EXPECT_EQ(Arguments("(1,)"), "{\"x\": [1]}");
  EXPECT_EQ(Arguments("[1, [2, {\"a\": (), 'b': {}},], ]"), "{\"x\": [1, [2, {\"a\": [], \"b\": {}}]]}");
  EXPECT_EQ(Arguments("-1.5e3"), "{\"x\": -1.5e3}");
  EXPECT_EQ(Arguments("123456789012345678901234567890"), "{\"x\": 123456789012345678901234567890}");
  EXPECT_EQ(Arguments("1, y=False,"), "{\"x\": 1, \"y\": false}");
  for (const char* no :
       {"", "y", "1.", "0x1", "f()", "[1", "{1: 2}", "{'a'}", "'\\ud800'", "'\\xg1'", "1 2", "'a' 'b'"})
    EXPECT_EQ(Arguments(no), "none") << no;
}

TEST(PythonicFormatTest, DeepLiteralsAreNoCalls) {
  EXPECT_NE(Arguments(std::string(60, '[') + std::string(60, ']')), "none");
  EXPECT_EQ(Arguments(std::string(100'000, '[') + std::string(100'000, ']')), "none");
}

}  // namespace
}  // namespace spl::router
