// Whole pulls from a hub on loopback: what is fetched, what survives, what is refused.
#include "services/hub/pull.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <thread>

#include "services/hub/pull_record.h"
#include "tests/support/hub_server.h"
#include "tests/support/temp_dir.h"

namespace spl::hub {
namespace {

namespace fs = std::filesystem;
using absl::StatusCode;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::HubServer;

constexpr char kName[] = "org/model";
constexpr char kShard1[] = "model-00001-of-00002.safetensors", kShard2[] = "model-00002-of-00002.safetensors";

std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Bytes that differ from place to place.
std::string Bytes(size_t size, uint32_t seed) {
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>((seed = seed * 1664525 + 1013904223) >> 24);
  return bytes;
}

std::map<std::string, std::string> SmallModel(uint32_t seed = 1) {
  return {{"config.json", "{\"seed\": " + std::to_string(seed) + "}"},
          {"tokenizer.json", Bytes(3000, seed + 1)},
          {"tokenizer_config.json", "{}"},
          {"model.safetensors.index.json", std::string(R"({"weight_map": {"a": ")") + kShard1 + R"(", "b": ")" +
                                               kShard2 + R"(", "c": ")" + kShard1 + "\"}}"},
          {kShard1, Bytes(700'000, seed + 2)},
          {kShard2, Bytes(300'000, seed + 3)},
          {"README.md", "not needed"},
          {"consolidated.safetensors", "the same weights again"},
          {"pytorch_model.bin", "and again"}};
}

class PullTest : public ::testing::Test {
 protected:
  PullTest() { hub_.Put(kName, SmallModel()); }

  PullOptions Options(const std::string& dir = "model") {
    PullOptions options{.name = {kName}, .dir = dir_.path() + "/" + dir, .hub = {.url = hub_.url()}};
    options.first_pause = std::chrono::milliseconds(1);
    options.hub.timeout = std::chrono::milliseconds(20'000);
    return options;
  }
  // The model's files are there with their contents, and no others.
  static void ExpectModel(const std::string& dir, const std::map<std::string, std::string>& files) {
    size_t there = 0;
    for (const auto& entry : fs::directory_iterator(dir)) there += entry.is_regular_file() ? 1 : 0;
    size_t needed = 0;
    for (const auto& [name, content] : files) {
      if (name == "README.md" || name == "consolidated.safetensors" || name == "pytorch_model.bin") continue;
      ++needed;
      EXPECT_TRUE(ReadFile(dir + "/" + name) == content) << name;
    }
    EXPECT_EQ(there, needed);
    for (const auto& entry : fs::directory_iterator(dir + "/" + kPullFolder))
      EXPECT_THAT(entry.path().filename().string(), ::testing::AnyOf("lock", "record.json"));
  }
  static std::string Failure(const PullOptions& options, StatusCode code) {
    const absl::Status status = PullModel(options).status();
    EXPECT_EQ(status.code(), code) << status;
    return std::string(status.message());
  }
  static absl::StatusOr<PullResult> Pull(const PullOptions& options) {
    auto result = PullModel(options);
    EXPECT_TRUE(result.ok()) << result.status();
    return result;
  }
  std::vector<std::string> RangesOf(const std::string& file) const {
    std::vector<std::string> ranges;
    for (const auto& request : hub_.requests()) {
      if (request.target.ends_with(file)) ranges.push_back(request.range);
    }
    return ranges;
  }

  const testing::TempDir dir_;
  HubServer hub_;
};

TEST_F(PullTest, FetchesWhatIsNeededAndNothingTwice) {
  std::vector<PullProgress> seen;
  PullOptions options = Options();
  options.on_progress = [&](const PullProgress& progress) { seen.push_back(progress); };
  const auto first = Pull(options);
  ExpectModel(options.dir, SmallModel());
  EXPECT_EQ(first->commit, hub_.commit(kName));
  EXPECT_EQ(first->files.size(), 6u);
  EXPECT_GT(first->fetched_bytes, 1'000'000u);
  ASSERT_FALSE(seen.empty());
  EXPECT_EQ(seen.back().stage, PullProgress::Stage::kDone);
  EXPECT_EQ(seen.back().done, seen.back().size);
  EXPECT_EQ(hub_.CountRequests("README"), 0);
  EXPECT_EQ(hub_.CountRequests("consolidated"), 0);

  const size_t requests = hub_.requests().size();
  EXPECT_EQ(Pull(Options())->fetched_bytes, 0u);
  EXPECT_EQ(hub_.requests().size(), requests + 1) << "only the list of files";
}

TEST_F(PullTest, GoesOnWhereTheConnectionBroke) {
  hub_.SetRule(kShard1, {.break_after = 250'000, .breaks = 2});
  ASSERT_TRUE(Pull(Options()).ok());
  ExpectModel(Options().dir, SmallModel());
  EXPECT_THAT(RangesOf(kShard1), ::testing::ElementsAre("", "bytes=250000-", "bytes=500000-"));
}

TEST_F(PullTest, AnotherCallGoesOnWhereTheLastOneFailed) {
  hub_.SetRule(kShard1, {.break_after = 100'000, .breaks = 1});
  PullOptions options = Options();
  options.max_tries = 1;
  EXPECT_THAT(Failure(options, StatusCode::kUnavailable), HasSubstr(kShard1));
  EXPECT_FALSE(fs::exists(options.dir + "/" + kShard1)) << "nothing incomplete is in place";
  ASSERT_TRUE(Pull(options).ok());
  ExpectModel(options.dir, SmallModel());
  EXPECT_EQ(RangesOf(kShard1).back(), "bytes=100000-");
}

TEST_F(PullTest, AStoppedPullKeepsWhatHasCome) {
  hub_.SetRule(kShard1, {.hold_after = 400'000});
  PullOptions options = Options();
  std::atomic<bool> stop{false};
  options.stopped = [&] { return stop.load(); };
  options.on_progress = [&](const PullProgress& progress) {
    for (const auto& file : progress.files) {
      if (file.name == kShard1 && file.done == 400'000) stop = true;
    }
  };
  EXPECT_EQ(PullModel(options).status().code(), StatusCode::kCancelled);
  hub_.Release();
  stop = false;
  options.on_progress = nullptr;
  ASSERT_TRUE(Pull(options).ok());
  ExpectModel(options.dir, SmallModel());
  EXPECT_EQ(RangesOf(kShard1).back(), "bytes=400000-");
}

TEST_F(PullTest, AFileThatChangedMeanwhileIsNotContinued) {
  hub_.SetRule(kShard1, {.break_after = 100'000, .breaks = 1});
  PullOptions options = Options();
  options.max_tries = 1;
  Failure(options, StatusCode::kUnavailable);
  hub_.Put(kName, SmallModel(9));
  ASSERT_TRUE(Pull(options).ok());
  ExpectModel(options.dir, SmallModel(9));
  EXPECT_EQ(RangesOf(kShard1).back(), "");
}

TEST_F(PullTest, AServerThatIgnoresRangesIsReadFromTheStart) {
  hub_.IgnoreRanges();
  hub_.SetRule(kShard1, {.break_after = 250'000, .breaks = 1});
  ASSERT_TRUE(Pull(Options()).ok());
  ExpectModel(Options().dir, SmallModel());
}

TEST_F(PullTest, AWrongChecksumIsFetchedAgainOnceAndThenRefused) {
  hub_.SetRule(kShard2, {.corruptions = 1});
  ASSERT_TRUE(Pull(Options("once")).ok());
  ExpectModel(Options("once").dir, SmallModel());

  hub_.SetRule(kShard2, {.corruptions = 1000});
  EXPECT_THAT(Failure(Options("always"), StatusCode::kDataLoss), AllOf(HasSubstr(kShard2), HasSubstr("sha256:")));
  EXPECT_FALSE(fs::exists(Options("always").dir + "/config.json"));
  hub_.SetRule(kShard2, {});
  hub_.SetRule("config.json", {.corruptions = 1000});
  EXPECT_THAT(Failure(Options("small"), StatusCode::kDataLoss), AllOf(HasSubstr("config.json"), HasSubstr("git:")));
}

TEST_F(PullTest, AFailedUpdateLeavesTheOldModelAndAnUpdateReplacesIt) {
  ASSERT_TRUE(Pull(Options()).ok());
  std::map<std::string, std::string> next = SmallModel(5);
  next["tokenizer.json"] = SmallModel().at("tokenizer.json");
  hub_.Put(kName, next);
  hub_.SetRule(kShard2, {.break_after = 10, .breaks = 1000});
  PullOptions options = Options();
  options.max_tries = 1;
  Failure(options, StatusCode::kUnavailable);
  EXPECT_TRUE(ReadFile(options.dir + "/" + kShard1) == SmallModel().at(kShard1));
  EXPECT_TRUE(HasFilesOf(options.dir, ReadPullRecord(options.dir).value()));

  hub_.SetRule(kShard2, {});
  ASSERT_TRUE(Pull(options).ok());
  ExpectModel(options.dir, next);
  EXPECT_EQ(hub_.CountRequests("tokenizer.json"), 1) << "it has not changed";
}

TEST_F(PullTest, OtherHostsDoNotGetTheToken) {
  HubServer cdn;
  for (const auto& [name, content] : SmallModel()) cdn.AddBlob(content);
  hub_.RequireToken("secret");
  hub_.RedirectLfsTo(cdn.url());
  PullOptions options = Options();
  options.hub.token = "secret";
  ASSERT_TRUE(Pull(options).ok());
  ExpectModel(options.dir, SmallModel());
  EXPECT_EQ(cdn.CountRequests("/lfs/"), 3);
  for (const auto& request : cdn.requests()) EXPECT_EQ(request.authorization, "") << request.target;
  for (const auto& request : hub_.requests()) EXPECT_EQ(request.authorization, "Bearer secret") << request.target;
}

TEST_F(PullTest, DigestsOfEtagsServeWhereTheListHasNone) {
  HubServer cdn;
  for (const auto& [name, content] : SmallModel()) cdn.AddBlob(content);
  hub_.RedirectLfsTo(cdn.url());
  hub_.HideDigests(/*also_etags=*/false);
  ASSERT_TRUE(Pull(Options()).ok());
  ExpectModel(Options().dir, SmallModel());
  const PullRecord record = ReadPullRecord(Options().dir).value();  // a temporary would end before the loop
  for (const HubFile& file : record.files) EXPECT_TRUE(file.digest.known()) << file.name;

  hub_.RedirectLfsTo("");
  hub_.SetRule("config.json", {.corruptions = 1000});
  EXPECT_THAT(Failure(Options("wrong"), StatusCode::kDataLoss), HasSubstr("config.json"));
}

TEST_F(PullTest, WithoutAnyDigestAFileIsFetchedWhole) {
  hub_.HideDigests(/*also_etags=*/true);
  hub_.SetRule(kShard1, {.break_after = 250'000, .breaks = 1});
  ASSERT_TRUE(Pull(Options()).ok());
  ExpectModel(Options().dir, SmallModel());
  EXPECT_THAT(RangesOf(kShard1), ::testing::ElementsAre("", ""));
}

TEST_F(PullTest, RefusalsSayWhatToDo) {
  hub_.RequireToken("secret");
  EXPECT_THAT(Failure(Options(), StatusCode::kPermissionDenied),
              AllOf(HasSubstr("accept its licence"), HasSubstr("HF_TOKEN"), HasSubstr(hub_.url() + "/org/model")));
  PullOptions wrong = Options();
  wrong.hub.token = "another";
  EXPECT_THAT(Failure(wrong, StatusCode::kPermissionDenied), HasSubstr("the token that was sent"));
  hub_.RequireToken("");
  PullOptions missing = Options();
  missing.name = {"org/other"};
  EXPECT_THAT(Failure(missing, StatusCode::kNotFound), AllOf(HasSubstr("org/other"), HasSubstr("does not exist")));
  PullOptions revision = Options();
  revision.name.revision = "v9";
  EXPECT_THAT(Failure(revision, StatusCode::kNotFound), HasSubstr("no such revision"));
  EXPECT_FALSE(fs::exists(Options().dir)) << "nothing is made for a model that cannot be fetched";
}

TEST_F(PullTest, RepositoriesWithoutSafetensorsAreRefused) {
  const auto why = [&](const std::map<std::string, std::string>& files) {
    hub_.Put(kName, files);
    return Failure(Options(), StatusCode::kFailedPrecondition);
  };
  EXPECT_THAT(why({{"model-Q4.gguf", "x"}}), HasSubstr("GGUF"));
  EXPECT_THAT(why({{"config.json", "{}"}, {"pytorch_model.bin", "x"}}), HasSubstr("convert them to safetensors"));
  EXPECT_THAT(why({{"config.json", "{}"}, {"adapter_model.safetensors", "x"}}), HasSubstr("adapter"));
  EXPECT_THAT(why({{"config.json", "{}"}}), HasSubstr("no weights"));
  EXPECT_THAT(why({{"model.safetensors", "x"}}), HasSubstr("no config.json"));
  auto torn = SmallModel();
  torn.erase(kShard2);
  EXPECT_THAT(why(torn), HasSubstr(std::string(kShard2) + " is named by its index"));
  auto outside = SmallModel();
  outside["model.safetensors.index.json"] = R"({"weight_map": {"a": "../../evil.safetensors"}})";
  hub_.Put(kName, outside);
  EXPECT_THAT(Failure(Options(), StatusCode::kInvalidArgument), HasSubstr("plain name"));
}

TEST_F(PullTest, TroubleThatPassesIsTriedAgain) {
  hub_.FailNext(503, 2);
  ASSERT_TRUE(Pull(Options()).ok());
  hub_.FailNext(503, 100);
  EXPECT_THAT(Failure(Options("other"), StatusCode::kUnavailable), HasSubstr("HTTP 503"));
}

TEST_F(PullTest, TwoPullsOfAFolderGoOneBehindTheOther) {
  hub_.SetRule(kShard1, {.hold_after = 1000});
  absl::StatusOr<PullResult> first;
  PullOptions second = Options();
  std::atomic<bool> has_lock{false};
  std::thread other([&] {
    PullOptions options = Options();
    options.on_progress = [&](const PullProgress& progress) {
      if (progress.stage == PullProgress::Stage::kFetching) has_lock = true;
    };
    first = PullModel(options);
    has_lock = true;  // also where it failed
  });
  while (!has_lock) std::this_thread::yield();
  bool waited = false;
  second.on_progress = [&](const PullProgress& progress) {
    if (progress.stage != PullProgress::Stage::kWaiting) return;
    waited = true;
    hub_.Release();
  };
  const auto result = PullModel(second);
  other.join();
  ASSERT_TRUE(first.ok() && result.ok()) << first.status() << result.status();
  EXPECT_TRUE(waited);
  EXPECT_EQ(result->fetched_bytes, 0u);
  EXPECT_EQ(hub_.CountRequests(kShard1), 1);
  ExpectModel(second.dir, SmallModel());
}

TEST_F(PullTest, NoRoomIsSaidBeforeTheWeightsAreFetched) {
  PullOptions options = Options();
  options.spare_bytes = uint64_t{1} << 62;
  EXPECT_THAT(Failure(options, StatusCode::kResourceExhausted), HasSubstr("make room"));
  EXPECT_EQ(hub_.CountRequests(kShard1), 0);
}

TEST_F(PullTest, FilesThatAreThereAreCheckedAndKept) {
  const PullOptions options = Options();
  fs::create_directories(options.dir);
  std::ofstream(options.dir + "/" + kShard1, std::ios::binary) << SmallModel().at(kShard1);
  std::string damaged = SmallModel().at(kShard2);
  damaged[17] ^= 1;
  std::ofstream(options.dir + "/" + kShard2, std::ios::binary) << damaged;
  ASSERT_TRUE(Pull(options).ok());
  ExpectModel(options.dir, SmallModel());
  EXPECT_EQ(hub_.CountRequests(kShard1), 0);
  EXPECT_EQ(hub_.CountRequests(kShard2), 1);
}

TEST_F(PullTest, AModelThatIsElsewhereIsNotFetched) {
  PullOptions options = Options();
  options.is_elsewhere = [&](const std::string& commit) { return commit == hub_.commit(kName); };
  EXPECT_EQ(Pull(options)->fetched_bytes, 0u);
  EXPECT_FALSE(fs::exists(options.dir));
}

TEST_F(PullTest, ATokenDoesNotTravelUnencryptedToAnotherMachine) {
  PullOptions options = Options();
  options.hub.url = "http://hub.example.com";
  options.hub.token = "secret";
  EXPECT_THAT(Failure(options, StatusCode::kInvalidArgument), HasSubstr("unencrypted"));
  options.hub = {.url = hub_.url(), .token = "two\r\nlines"};
  EXPECT_THAT(Failure(options, StatusCode::kInvalidArgument), HasSubstr("control character"));
}

}  // namespace
}  // namespace spl::hub
