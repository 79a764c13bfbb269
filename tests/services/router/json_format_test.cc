#include <gtest/gtest.h>

#include "tests/services/router/output_format_cases.h"

namespace spl::router {
namespace {

TEST(JsonFormatTest, Answers) {
  ExpectCases(
      {.tools = "json"},
      {{"one call", "{\"name\": \"a\", \"arguments\": {\"x\": \"}\"}}", {"", "", {"a({\"x\": \"}\"})"}}},
       {"parameters, and text behind", "\n{\"name\": \"a\", \"parameters\": {}}\nDone.", {"", "Done.", {"a({})"}}},
       {"a list",
        "[{\"name\": \"a\", \"arguments\": {}}, {\"name\": \"b\", \"arguments\": {\"x\": [\"]\"]}}]",
        {"", "", {"a({})", "b({\"x\": [\"]\"]})"}}},
       {"between fences", "```json\n{\"name\": \"a\", \"arguments\": {}}\n```\n", {"", "", {"a({})"}}},
       {"fences without a language, a list, text behind",
        "```\n[{\"name\": \"a\", \"arguments\": {}}]```\n\nDone.",
        {"", "Done.", {"a({})"}}},
       {"one behind another",
        "{\"name\": \"a\", \"arguments\": {}}\n{\"name\": \"b\", \"arguments\": {}}; {\"name\": \"c\", \"arguments\": "
        "{}}",
        {"", "", {"a({})", "b({})", "c({})"}}},
       {"fences one behind another",
        "```json\n{\"name\": \"a\", \"arguments\": {}}\n```\n```json\n{\"name\": \"b\", \"arguments\": {}}\n```",
        {"", "", {"a({})", "b({})"}}},
       {"no end of the fence", "```json\n{\"name\": \"a\", \"arguments\": {}}\n``", {"", "", {"a({})"}}},
       {"text in front",
        "Ok: {\"name\": \"a\", \"arguments\": {}}",
        {"", "Ok: {\"name\": \"a\", \"arguments\": {}}", {}}},
       {"other JSON", "{\"name\": \"Bob\", \"age\": 5} x", {"", "{\"name\": \"Bob\", \"age\": 5} x", {}}},
       {"a list of which one is no call",
        "[{\"name\": \"a\", \"arguments\": {}}, 1]",
        {"", "[{\"name\": \"a\", \"arguments\": {}}, 1]", {}}},
       {"an empty list", "[] x", {"", "[] x", {}}},
       {"other JSON behind a call",
        "{\"name\": \"a\", \"arguments\": {}} {\"b\": 1} y ",
        {"", "{\"b\": 1} y ", {"a({})"}}},
       {"other code", "```python\nf()\n```", {"", "```python\nf()\n```", {}}},
       {"other code of JSON", "```json\n{\"a\": 1}\n```", {"", "```json\n{\"a\": 1}\n```", {}}},
       {"cut off", " {\"name\": \"a\", \"arguments\": {\"x", {"", " {\"name\": \"a\", \"arguments\": {\"x", {}}},
       {"cut off in the fence", "```js", {"", "```js", {}}},
       {"cut off behind a call", "{\"name\": \"a\", \"arguments\": {}},", {"", "", {"a({})"}}},
       {"malformed", "{\"name\": \"a\", \"arguments\": {x}}", {"", "{\"name\": \"a\", \"arguments\": {x}}", {}}},
       {"a line of a quote", "``x``", {"", "``x``", {}}},
       {"white space", " \n", {"", " \n", {}}},
       {"nothing", "", {"", "", {}}}});
}

}  // namespace
}  // namespace spl::router
