// Names of models, folders that lack something, and where models are found.
#include "services/hub/model_places.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "services/hub/pull_record.h"
#include "tests/support/temp_dir.h"

namespace spl::hub {
namespace {

namespace fs = std::filesystem;
using absl::StatusCode;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(ModelNameTest, Forms) {
  const auto text = [](const char* name) { return ParseModelName(name).value().ToString(); };
  EXPECT_EQ(text("Qwen/Qwen3-8B"), "Qwen/Qwen3-8B");
  EXPECT_EQ(text("org/name@main"), "org/name");
  EXPECT_EQ(text("org/name@refs/pr/1"), "org/name@refs/pr/1");
  for (const char* bad : {"", "name", "/name", "org/", "a/b/c", "../name", "org/..", ".org/name", "org/na me",
                          "org/name@", "org/name@../x", "org/name@/x", "-o/name", "org/n\xc3\xa4me", "/tmp/model"})
    EXPECT_EQ(ParseModelName(bad).status().code(), StatusCode::kInvalidArgument) << bad;
}

TEST(ModelNameTest, FoldersAreCalledByTheirLastPart) {
  EXPECT_EQ(FolderModelName("/a/Model"), "Model");
  EXPECT_EQ(FolderModelName("/a/Model/"), "Model");
  EXPECT_EQ(FolderModelName("x/../y/."), "y");
  EXPECT_EQ(FolderModelName("/hub/models--org--Some-Model/snapshots/0123abcd"), "Some-Model");
}

class ModelPlacesTest : public ::testing::Test {
 protected:
  static void Write(const std::string& path, const std::string& text) {
    fs::create_directories(fs::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << text;
  }
  void WriteModel(const std::string& dir) {
    Write(dir + "/config.json", "{}");
    Write(dir + "/model.safetensors", "weights");
  }
  std::string Snapshot(const std::string& commit) const {
    return places_.hf_cache + "/models--org--model/snapshots/" + commit;
  }

  const testing::TempDir dir_;
  const ModelPlaces places_{.models = dir_.path() + "/models", .hf_cache = dir_.path() + "/hf/hub"};
  const ModelName name_{"org/model"};
};

TEST_F(ModelPlacesTest, AFolderSaysWhatItLacks) {
  const std::string dir = dir_.path() + "/m";
  const auto status = [&] { return LocalModelFolder(places_, dir, FolderUse::kModel).status(); };
  fs::create_directories(dir);
  EXPECT_THAT(std::string(status().message()),
              AllOf(HasSubstr("config.json: missing"), HasSubstr("splice pull ORG/NAME --to " + dir)));
  WriteModel(dir);
  EXPECT_TRUE(status().ok()) << status();
  Write(dir + "/model.safetensors.index.json", R"({"weight_map": {"a": "s1.safetensors", "b": "s2.safetensors"}})");
  Write(dir + "/s1.safetensors", "weights");
  EXPECT_EQ(status().code(), StatusCode::kNotFound);
  EXPECT_THAT(std::string(status().message()), HasSubstr("s2.safetensors: missing"));
  Write(dir + "/s2.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n");
  EXPECT_EQ(status().code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status().message()),
              AllOf(HasSubstr("s2.safetensors"), HasSubstr("Git LFS pointer"), HasSubstr("splice pull")));
  EXPECT_TRUE(LocalModelFolder(places_, dir, FolderUse::kTextOnly).ok());
  Write(dir + "/tokenizer.json", "version https://git-lfs.github.com/spec/v1\n");
  EXPECT_THAT(std::string(LocalModelFolder(places_, dir, FolderUse::kTextOnly).status().message()),
              HasSubstr("tokenizer.json"));
}

TEST_F(ModelPlacesTest, APulledFolderIsFoundOnceItIsComplete) {
  const std::string own = places_.FolderOf(name_);
  EXPECT_EQ(own, places_.models + "/org/model");
  EXPECT_EQ(FindModel(places_, name_).status().code(), StatusCode::kNotFound);
  WriteModel(own);
  EXPECT_FALSE(FindModel(places_, name_).ok()) << "without a record nobody knows that it is whole";
  fs::create_directories(own + "/" + kPullFolder);
  const PullRecord record{name_, std::string(40, 'a'), {{"config.json", 2, {}}, {"model.safetensors", 7, {}}}};
  ASSERT_TRUE(WritePullRecord(own, record).ok());
  EXPECT_EQ(FindModel(places_, name_)->dir, own);
  EXPECT_EQ(LocalModelFolder(places_, "org/model", FolderUse::kModel).value(), own);
  EXPECT_FALSE(FindModel(places_, {"org/model", "v1"}).ok()) << "another revision";
  fs::remove(own + "/model.safetensors");
  EXPECT_FALSE(FindModel(places_, name_).ok());
  EXPECT_THAT(std::string(LocalModelFolder(places_, own, FolderUse::kModel).status().message()),
              HasSubstr("splice pull org/model --to"));
}

TEST_F(ModelPlacesTest, HuggingFacesCacheIsUsed) {
  const std::string commit(40, 'c');
  Write(places_.hf_cache + "/models--org--model/refs/main", commit);
  Write(Snapshot(commit) + "/config.json", "{}");
  EXPECT_FALSE(FindModel(places_, name_).ok()) << "no weights yet";
  WriteModel(Snapshot(commit));
  const auto found = FindModel(places_, name_);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->dir, Snapshot(commit));
  EXPECT_EQ(found->commit, commit);
  EXPECT_EQ(FolderModelName(found->dir), "model");
  EXPECT_TRUE(FindModel(places_, {"org/model", commit}).ok()) << "by its commit";
  EXPECT_FALSE(FindModel(places_, {"org/model", "v1"}).ok());
  Write(places_.hf_cache + "/models--org--model/refs/v1", "../../../../etc");
  EXPECT_FALSE(FindModel(places_, {"org/model", "v1"}).ok());
}

TEST_F(ModelPlacesTest, MessagesTellTheCommand) {
  EXPECT_THAT(std::string(LocalModelFolder(places_, "org/model", FolderUse::kModel).status().message()),
              HasSubstr("run: splice pull org/model"));
  EXPECT_THAT(std::string(LocalModelFolder(places_, "/no/such/folder", FolderUse::kModel).status().message()),
              AllOf(HasSubstr("no such folder"), HasSubstr("ORG/NAME")));
}

TEST_F(ModelPlacesTest, ADamagedRecordIsNone) {
  Write(places_.FolderOf(name_) + "/" + kPullFolder + "/record.json", "{\"commit\": 3}");
  EXPECT_EQ(ReadPullRecord(places_.FolderOf(name_)).status().code(), StatusCode::kInvalidArgument);
  EXPECT_FALSE(FindModel(places_, name_).ok());
}

TEST(FileDigestTest, KnownValues) {
  FileHasher sha256(FileDigest::Kind::kSha256, 3), git(FileDigest::Kind::kGitBlob, 3);
  sha256.Add("abc");
  git.Add("a");
  git.Add("bc");
  EXPECT_EQ(sha256.Finish().ToString(), "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(git.Finish().ToString(), "git:f2ba8f84ab5c1bce84a7b441cb1959cfc7093b7f");  // git hash-object says so
  EXPECT_FALSE(ParseFileDigest("sha256:12").known());
  EXPECT_EQ(DigestOfEtag("W/\"" + std::string(40, 'f') + "\"").kind, FileDigest::Kind::kGitBlob);
  EXPECT_FALSE(DigestOfEtag("\"12-34\"").known());
}

}  // namespace
}  // namespace spl::hub
