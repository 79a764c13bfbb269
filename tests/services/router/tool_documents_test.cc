#include "services/router/request/tool_documents.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "services/router/request/served_model.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

namespace spl::router {
namespace {

// A text of so many bytes that begins with a letter.
std::string Long(char letter, size_t bytes = kMinToolDocumentBytes) { return std::string(bytes, letter); }

std::vector<std::string> Documents(const std::string& rule, const std::string& result) {
  const auto parsed = ParseToolDocumentRule(rule);
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  std::vector<std::string> out;
  for (const DocumentRange& range : DocumentsIn(*parsed, result))
    out.push_back(result.substr(range.begin, range.end - range.begin));
  return out;
}

using Texts = std::vector<std::string>;

TEST(ToolDocumentsTest, AreFoundByEachRule) {
  const std::string a = Long('a'), b = Long('b', 300), shorter = Long('c', kMinToolDocumentBytes - 1);
  EXPECT_EQ(Documents("none", a), Texts());
  EXPECT_EQ(Documents("whole", a), Texts{a});
  EXPECT_EQ(Documents("whole", shorter), Texts());
  EXPECT_EQ(Documents("between:\\n\\n", a + "\n\n" + shorter + "\n\n\n" + b), (Texts{a, "\n" + b}));
  EXPECT_EQ(Documents("between:--", a + "--"), Texts{a});
  const std::string object = R"({"text": "\"]}, )" + a + R"(", "n": [1, {"x": 2}]})", text = '"' + b + '"';
  EXPECT_EQ(Documents("json", " [" + object + " , 1,\n" + text + ",[]] "), (Texts{object, text}));
  EXPECT_EQ(Documents("json", object), Texts());
  EXPECT_EQ(Documents("json", "[" + text), Texts()) << "no JSON";
  EXPECT_EQ(Documents("json", "[]"), Texts());
  const std::string nested = R"({"a": 1.5, "b": {"r\u0065sults": [)" + text + R"(]}, "results": [0]})";
  EXPECT_EQ(Documents("json:/b/results", nested), Texts{text});
  EXPECT_EQ(Documents("json:/results", nested), Texts());
  EXPECT_EQ(Documents("json:/b/results/deeper", nested), Texts());
  EXPECT_EQ(Documents("json:/none", nested), Texts());
}

TEST(ToolDocumentsTest, OtherRulesAreRefusedByTheFlagsName) {
  for (const char* rule : {"", "all", "between:", "json:", "json:/", "json:results"}) {
    const auto parsed = ParseToolDocumentRule(rule);
    ASSERT_FALSE(parsed.ok()) << rule;
    EXPECT_NE(parsed.status().message().find("--tool-result-documents"), std::string::npos) << parsed.status();
  }
}

std::unique_ptr<ServedModel> ModelWith(const std::string& chat_template, const std::string& rule) {
  const testing::TempDir folder;
  for (const char* file : {"tokenizer.json", "tokenizer_config.json", "config.json"})
    std::filesystem::copy(test::kTinyModel + "/" + file, folder.path() + "/" + file);
  std::ofstream(folder.path() + "/chat_template.jinja") << chat_template;
  auto model = ServedModel::Load({.dir = folder.path(), .tool_result_documents = rule});
  EXPECT_TRUE(model.ok()) << model.status();
  return *std::move(model);
}

TEST(ToolDocumentsTest, AreSegmentsOfThePrompt) {
  constexpr char kTemplate[] = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
  const auto model = ModelWith(kTemplate, "between:\\n"), plain = ModelWith(kTemplate, "none");
  const std::string a = "Of tea. " + Long('a'), b = "Of coffee. " + Long('b');
  ChatPrompt chat;
  chat.messages = {{.role = "user", .content = a}, {.role = "tool", .content = a + "\n" + b + "\nend"}};
  const auto prompt = model->Tokenize(chat, false);
  ASSERT_TRUE(prompt.ok()) << prompt.status();
  ASSERT_EQ(prompt->segments.size(), 2u) << "not of the user's message";
  for (size_t i = 0; i < 2; ++i) {
    const TokenSegment& segment = prompt->segments[i];
    const std::vector<TokenId> ids(prompt->ids.begin() + segment.begin, prompt->ids.begin() + segment.end);
    EXPECT_EQ(ids, *model->EncodeSegment(i == 0 ? a : b));
  }
  const auto decode = [&](const TokenizedPrompt& tokens) { return *model->tokenizer().Decode(tokens.ids, {}); };
  EXPECT_EQ(decode(*prompt), decode(*plain->Tokenize(chat, false))) << "the text is the same";
  EXPECT_TRUE(plain->Tokenize(chat, false)->segments.empty());
  // Segments of the client's own go before.
  ChatPrompt own = chat;
  own.messages[0].content = own.segments.Add({.text = "mine", .namespace_name = {}});
  EXPECT_EQ(model->Tokenize(own, false)->segments.size(), 1u);
}

TEST(ToolDocumentsTest, ATemplateThatChangesResultsGetsThemAsText) {
  const auto model =
      ModelWith("{% for m in messages %}{{ m.content | upper }}{{ m.content | length }}{% endfor %}", "whole");
  ChatPrompt chat;
  chat.messages = {{.role = "tool", .content = Long('a', 300)}};
  const auto prompt = model->Tokenize(chat, false);
  ASSERT_TRUE(prompt.ok()) << prompt.status();
  EXPECT_TRUE(prompt->segments.empty());
  EXPECT_EQ(*model->tokenizer().Decode(prompt->ids, {}), Long('A', 300) + "300");
}

}  // namespace
}  // namespace spl::router
