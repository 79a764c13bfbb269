#include "services/text/regex.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "services/base/status.h"
#include "services/text/regex_dialect.h"

namespace spl::text {
namespace {

using testing::HasSubstr;

std::vector<std::string> Matches(std::string_view pattern, std::string_view text) {
  const auto regex = Regex::Compile(pattern);
  if (!regex.ok()) return {"error: " + MessageOf(regex.status())};
  std::vector<Span> spans;
  if (const absl::Status status = regex->FindAll(text, &spans); !status.ok()) return {"error: " + MessageOf(status)};
  std::vector<std::string> matches;
  for (const Span& span : spans) matches.emplace_back(text.substr(span.begin, span.end - span.begin));
  return matches;
}

using Strings = std::vector<std::string>;

TEST(RegexTest, RubyMeansWhatRubyMeans) {
  EXPECT_EQ(Matches("\\h+", "xyzBEEF 12"), (Strings{"BEEF", "12"}));  // hex digits, not horizontal space
  EXPECT_EQ(Matches("\\s", "a\u180e\u00a0\u2003b\u0085"), (Strings{"\u00a0", "\u2003", "\u0085"}));
  EXPECT_EQ(Matches("[^\\S\\n]+", "a \u3000\n\u180e"), (Strings{" \u3000"}));
  EXPECT_EQ(Matches("^b$", "a\nb\nc"), (Strings{"b"}));  // always by lines
  EXPECT_EQ(Matches("a.c", "a\nc"), (Strings{}));
  EXPECT_EQ(Matches("(?m:a.c)", "a\nc"), (Strings{"a\nc"}));  // m: dot matches newlines
  EXPECT_EQ(Matches("x{,2}y", "xxxy"), (Strings{"xxy"}));
  EXPECT_EQ(Matches("\\w+", "e\u0301_x\u203f1 ²"),
            (Strings{"e\u0301_x\u203f1"}));  // marks and connectors, not every number
  EXPECT_EQ(Matches("\\bx", "x \u0301x e\u0301x"), (Strings{"x"}));
  EXPECT_EQ(Matches("\\u0041", "A"), (Strings{"A"}));
  EXPECT_EQ(Matches("[]a]+", "]a["), (Strings{"]a"}));
  EXPECT_EQ(Matches("(?i:'s|'RE)", "'S 're '\u017f"), (Strings{"'S", "'re", "'\u017f"}));
  EXPECT_EQ(Matches("\\p{Han}+", "a漢字b"), (Strings{"漢字"}));
}

TEST(RegexTest, EmptyMatchesAdvanceByCharacters) {
  const auto regex = Regex::Compile("x*");
  ASSERT_TRUE(regex.ok());
  std::vector<Span> spans;
  ASSERT_TRUE(regex->FindAll("日xx", &spans).ok());
  ASSERT_EQ(spans.size(), 2u);  // before the character, and the two letters; not once more where they end
  EXPECT_EQ(spans[0].end, 0u);
  EXPECT_EQ(spans[1].begin, 3u);
  EXPECT_EQ(spans[1].end, 5u);
}

TEST(RegexTest, WhatDiffersAndCannotBeRewrittenIsRefused) {
  const std::pair<const char*, const char*> cases[] = {
      {"[a&&b]", "set operation &&"},
      {"[a[bc]]", "set inside a set"},
      {"[\\W]", "\\W inside a set"},
      {"a{1,3}+", "possessive interval"},
      {"a{3}?", "lazy mark on a fixed interval"},
      {"(?s:a)", "inline flag"},
      {"\\xE9", "raw byte"},
      {"(?~a)", "absence operator"},
      {"a\\", "backslash at the end"},
      {"[a", "not closed"},
  };
  for (const auto& [pattern, message] : cases) {
    const auto translated = OnigurumaToPcre2(pattern);
    ASSERT_FALSE(translated.ok()) << pattern;
    EXPECT_THAT(MessageOf(translated.status()), HasSubstr(message));
  }
}

TEST(RegexTest, BrokenPatternsSayWhere) {
  for (const char* pattern : {"(", ")", "*", "\\p{Nonsense}", "(?<=a*)b", "[z-a]", "(?P<"}) {
    const auto regex = Regex::Compile(pattern);
    ASSERT_FALSE(regex.ok()) << pattern;
    EXPECT_EQ(regex.status().code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_FALSE(Regex::Compile(std::string(100000, 'a')).ok());
}

TEST(RegexTest, BacktrackingWithoutEndIsAnError) {
  EXPECT_THAT(Matches("(a|aa)+[bc]", std::string(60, 'a')), testing::ElementsAre(HasSubstr("fails on this text")));
}

TEST(RegexTest, LongRunsFitTheStack) {
  const std::string pattern = "(?:\\s|[a-z])+(?!\\S)|\\s+";
  const std::string text(1 << 20, ' ');
  EXPECT_EQ(Matches("\\s+(?!\\S)|\\s+", text).size(), 1u);
  EXPECT_EQ(Matches(pattern, text).size(), 1u);  // one frame per repetition: more than the compiled code's stack holds
}

}  // namespace
}  // namespace spl::text
