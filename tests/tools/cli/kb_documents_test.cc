// Documents from folders and from lines of JSON.
#include "tools/cli/kb_documents.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "services/base/status.h"
#include "tests/support/temp_dir.h"

namespace spl::cli {
namespace {

using ::testing::HasSubstr;
using testing::TempDir;

std::string Write(const TempDir& dir, const std::string& name, const std::string& text) {
  const std::string path = dir.path() + "/" + name;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

TEST(ReadDocuments, LinesOfJson) {
  TempDir dir;
  const std::string path = Write(
      dir, "d.jsonl", "{\"id\":\"a\",\"text\":\"one\\ntwo\"}\n\n{\"text\":\"\u00fc\",\"id\":\"b\",\"more\":1}\r\n");
  const auto documents = ReadDocuments(path);
  ASSERT_TRUE(documents.ok()) << documents.status();
  ASSERT_EQ(documents->size(), 2u);
  EXPECT_EQ((*documents)[0].text, "one\ntwo");
  EXPECT_EQ((*documents)[1].id, "b");
}

TEST(ReadDocuments, BadLinesAreNamed) {
  TempDir dir;
  for (const char* line : {"{", "[]", "\"a\"", "{\"id\":\"a\"}", "{\"id\":1,\"text\":\"t\"}"}) {
    const std::string path = Write(dir, "d.jsonl", std::string("{\"id\":\"a\",\"text\":\"t\"}\n") + line + "\n");
    EXPECT_THAT(MessageOf(ReadDocuments(path).status()), HasSubstr("d.jsonl:2:")) << line;
  }
  EXPECT_FALSE(ReadDocuments(Write(dir, "empty.jsonl", "\n")).ok());
  EXPECT_FALSE(ReadDocuments(dir.path() + "/none").ok());
}

TEST(ReadDocuments, FilesOfAFolderByTheirPaths) {
  TempDir dir;
  Write(dir, "docs/b.txt", "bee");
  Write(dir, "docs/a/x.md", "ex");
  Write(dir, "docs/.git/config", "hidden");
  Write(dir, "docs/.hidden", "hidden");
  const auto documents = ReadDocuments(dir.path() + "/docs");
  ASSERT_TRUE(documents.ok()) << documents.status();
  ASSERT_EQ(documents->size(), 2u);
  EXPECT_EQ((*documents)[0].id, "a/x.md");
  EXPECT_EQ((*documents)[1].id, "b.txt");
  EXPECT_EQ((*documents)[1].text, "bee");
  std::filesystem::create_directories(dir.path() + "/none");
  EXPECT_FALSE(ReadDocuments(dir.path() + "/none").ok());
}

TEST(ReadFileOrText, PrefersTheFile) {
  TempDir dir;
  EXPECT_EQ(ReadFileOrText(Write(dir, "i.txt", "from the file")).value(), "from the file");
  EXPECT_EQ(ReadFileOrText("Answer from the documents.").value(), "Answer from the documents.");
  EXPECT_EQ(ReadFileOrText("").value(), "");
}

}  // namespace
}  // namespace spl::cli
