// The parts of `splice chat` below its terminal: history file and settings.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "tests/support/temp_dir.h"
#include "tools/cli/chat_history.h"
#include "tools/cli/chat_settings.h"
#include "tools/cli/terminal.h"

namespace spl::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

TEST(ChatHistoryTest, KeepsEntriesOfSeveralLinesInAPrivateFile) {
  const testing::TempDir dir;
  const std::string path = dir.path() + "/a/b/history";
  {
    auto history = ChatHistory::Open(path);
    ASSERT_TRUE(history.ok()) << history.status();
    EXPECT_THAT(history->entries(), ElementsAre());
    auto other = ChatHistory::Open(path);
    history->Add("first\nsecond \"line\"");
    other->Add(
        "gr\xc3\xbc\xc3\x9f"
        "e");
    history->Add("\xff is no UTF-8");
  }
  std::ofstream(path, std::ios::app) << "not JSON\n5\n";
  std::filesystem::permissions(path, std::filesystem::perms::all);
  const auto history = ChatHistory::Open(path);
  ASSERT_TRUE(history.ok());
  EXPECT_THAT(history->entries(), ElementsAre("first\nsecond \"line\"",
                                              "gr\xc3\xbc\xc3\x9f"
                                              "e",
                                              "\xef\xbf\xbd is no UTF-8"));
  struct stat file {};
  ASSERT_EQ(::stat(path.c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 0777, 0600U);
}

TEST(ChatHistoryTest, CutsALongFile) {
  const testing::TempDir dir;
  const std::string path = dir.path() + "/history";
  const size_t many = 2 * ChatHistory::kMaxEntries + 1;
  {
    std::ofstream file(path);
    for (size_t i = 0; i < many; ++i) file << '"' << i << "\"\n";
  }
  const auto history = ChatHistory::Open(path);
  ASSERT_TRUE(history.ok());
  ASSERT_EQ(history->entries().size(), ChatHistory::kMaxEntries);
  EXPECT_EQ(history->entries().back(), std::to_string(many - 1));
  std::ifstream file(path);
  EXPECT_EQ(std::count(std::istreambuf_iterator<char>(file), {}, '\n'), static_cast<long>(ChatHistory::kMaxEntries));
}

TEST(ChatHistoryTest, SaysWhenItCannotBeKept) {
  const auto history = ChatHistory::Open("/proc/no-such-folder/history");
  EXPECT_EQ(history.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Message(history.status()), HasSubstr("/proc/no-such-folder/history"));
}

TEST(ChatHistoryTest, DefaultPath) {
  ::setenv("HOME", "/home/x", 1);
  ::unsetenv("XDG_STATE_HOME");
  EXPECT_EQ(ChatHistory::DefaultPath(), "/home/x/.local/state/splice/chat_history");
  ::setenv("XDG_STATE_HOME", "relative", 1);
  EXPECT_EQ(ChatHistory::DefaultPath(), "/home/x/.local/state/splice/chat_history");
  ::setenv("XDG_STATE_HOME", "/state", 1);
  EXPECT_EQ(ChatHistory::DefaultPath(), "/state/splice/chat_history");
  ::unsetenv("XDG_STATE_HOME");
  ::unsetenv("HOME");
  EXPECT_EQ(ChatHistory::DefaultPath(), "");
}

TEST(ChatSettingsTest, GoIntoRequests) {
  ChatSettings settings(/*in_process=*/false);
  const std::pair<const char*, const char*> set[] = {
      {"temperature", "0.7"},
      {"top_p", "0.9"},
      {"top_k", "20"},
      {"min_p", "0.05"},
      {"seed", "7"},
      {"max_tokens", "64"},
      {"reuse", "samkv"},
      {"decode", "sparcas"},
      {"namespace", "docs"},
      {"samkv", R"({"budget_ratio": 0.25})"},
      {"repetition_penalty", "1.1"},
  };
  for (const auto& [name, value] : set) EXPECT_EQ(settings.Set(name, value), absl::OkStatus()) << name;
  TextRequest request{.reuse_options = {{"session", "s"}}};
  settings.Apply(request);
  EXPECT_EQ(request.temperature, 0.7);
  EXPECT_EQ(request.top_p, 0.9);
  EXPECT_EQ(request.top_k, 20);
  EXPECT_EQ(request.min_p, 0.05);
  EXPECT_EQ(request.seed, 7);
  EXPECT_EQ(request.max_tokens, 64);
  EXPECT_EQ(request.repetition_penalty, 1.1);
  EXPECT_EQ(request.reuse, "samkv");
  EXPECT_EQ(request.decode, "sparcas");
  EXPECT_EQ(request.reuse_options.dump(), R"({"namespace":"docs","samkv":{"budget_ratio":0.25},"session":"s"})");
  EXPECT_EQ(settings.ToString(),
            "temperature 0.7, top_p 0.9, min_p 0.05, repetition_penalty 1.1, top_k 20, seed 7, max_tokens 64, "
            "reuse samkv, decode sparcas, namespace docs, samkv {\"budget_ratio\":0.25}");
  for (const auto& [name, value] : set) EXPECT_EQ(settings.Set(name, "default"), absl::OkStatus()) << name;
  EXPECT_EQ(settings.ToString(), "");
  request = TextRequest{};
  settings.Apply(request);
  EXPECT_EQ(request.temperature, std::nullopt) << "the model's own";
}

TEST(ChatSettingsTest, RefusesWhatNoRequestTakes) {
  ChatSettings settings(/*in_process=*/false);
  for (const char* value : {"", "x", "-1", "2.5", "nan", "0.7x"})
    EXPECT_THAT(Message(settings.Set("temperature", value)), HasSubstr("temperature must be a number from 0 to 2"));
  EXPECT_THAT(Message(settings.Set("max_tokens", "1.5")), HasSubstr("whole number from 1"));
  EXPECT_THAT(Message(settings.Set("top_pp", "1")), HasSubstr("top_pp: there is no such setting"));
  EXPECT_THAT(Message(settings.Set("session", "x")), HasSubstr("there is no such setting"));
  EXPECT_THAT(Message(settings.Set("reuse", "5")), HasSubstr("reuse: must be a string"));
  EXPECT_THAT(Message(settings.Set("samkv", R"({"budget_ratioo": 1})")), HasSubstr("samkv.budget_ratioo"));
  EXPECT_EQ(settings.ToString(), "");
  ChatSettings local(/*in_process=*/true);
  EXPECT_THAT(Message(local.Set("reuse", "samkv")), HasSubstr("give --endpoint"));
  EXPECT_EQ(local.Set("top_p", "0.5"), absl::OkStatus());
}

TEST(TerminalTest, TextOfAModelCannotCommandTheTerminal) {
  EXPECT_EQ(WithoutControls("a\x1b[2J\tb\r\n\x07"
                            "c\x7f \xc3\xa9"),
            "a[2J\tb\nc \xc3\xa9");
}

TEST(TerminalTest, StyleWithoutColorIsPlain) {
  EXPECT_EQ(Style{}.Bold("x"), "x");
  EXPECT_EQ(Style{.color = true}.Dim("x"), "\x1b[2mx\x1b[0m");
}

}  // namespace
}  // namespace spl::cli
