#include "services/tokenizer/nfc.h"

#include <gtest/gtest.h>

#include "services/text/utf8.h"
#include "tests/services/tokenizer/test_files.h"

namespace spl::tokenizer {
namespace {

TEST(NfcTest, EqualsPython) {
  const auto lines = ReadJsonLines(std::string(kTestdata) + "/nfc.jsonl");
  ASSERT_EQ(lines.size(), 400u);
  int num_changed = 0;
  for (const auto& line : lines) {
    const auto text = line["text"].get<std::string>();
    const auto nfc = line["nfc"].get<std::string>();
    EXPECT_EQ(ToNfc(text), nfc) << line.dump();
    EXPECT_EQ(ToNfc(nfc), nfc) << "not idempotent: " << line.dump();
    num_changed += text != nfc;
  }
  EXPECT_GT(num_changed, 150);
}

TEST(NfcTest, EveryHangulSyllableComesBackFromItsParts) {
  for (char32_t syllable = 0xAC00; syllable <= 0xD7A3; ++syllable) {
    const char32_t idx = syllable - 0xAC00;
    std::string parts;
    text::AppendUtf8(0x1100 + idx / 588, &parts);
    text::AppendUtf8(0x1161 + idx / 28 % 21, &parts);
    if (idx % 28 != 0) text::AppendUtf8(0x11A7 + idx % 28, &parts);
    std::string whole;
    text::AppendUtf8(syllable, &whole);
    ASSERT_EQ(ToNfc(parts), whole);
    ASSERT_EQ(ToNfc(whole), whole);
  }
}

TEST(NfcTest, PlainTextIsLeftAlone) {
  for (const std::string text : {"", "plain", "Größe 日本語 🙂 Привет"}) {
    EXPECT_EQ(ToNfc(text), text);
  }
}

TEST(NfcTest, LongRunOfMarks) {
  std::string text = "a";
  for (int i = 0; i < 400000; ++i) text += i % 2 == 0 ? "\u0301" : "\u0323";
  const std::string nfc = ToNfc(text);
  EXPECT_TRUE(nfc.starts_with("\u1EA1\u0323"));  // a with dot below, then the other dots, then the accents
}

}  // namespace
}  // namespace spl::tokenizer
