// Text that commands draw: tables and the screen of `splice ctl top` at any size of the window, bars of progress.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <nlohmann/json.hpp>

#include "tools/cli/ctl_tables.h"
#include "tools/cli/progress_line.h"
#include "tools/cli/text_table.h"

namespace spl::cli {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::string Joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

TEST(TextTableTest, DropsColumnsByTheirOrderAndShortensFirst) {
  TextTable table({{.title = "name", .short_columns = 6},
                   {.title = "n", .right = true},
                   {.title = "more", .drop = 1},
                   {.title = "least", .drop = 2}});
  table.AddRow({"a-long-name", "1", "yes", "x"});
  table.AddRow({"\xc3\xa4", "22", "no", "y"});
  EXPECT_THAT(table.Lines(0, 9), ElementsAre("name          n  more  least", "a-long-name   1  yes   x",
                                             "\xc3\xa4            22  no    y"));
  EXPECT_THAT(table.Lines(28, 9), table.Lines(0, 9));
  EXPECT_THAT(table.Lines(27, 9),
              ElementsAre("name     n  more  least", "a-lon~   1  yes   x", "\xc3\xa4       22  no    y"));
  EXPECT_THAT(table.Lines(22, 9), ElementsAre("name     n  more", "a-lon~   1  yes", "\xc3\xa4       22  no"));
  EXPECT_THAT(table.Lines(12, 9), ElementsAre("name     n", "a-lon~   1", "\xc3\xa4       22"));
  EXPECT_THAT(table.Lines(5, 9), ElementsAre("name~", "a-lo~", "\xc3\xa4   ~"));
  EXPECT_THAT(table.Lines(12, 1), ElementsAre("name  n", "and 2 more"));
  EXPECT_THAT(table.Lines(12, 0), ElementsAre("name  n"));
}

json Request(int i, const std::string& stage) {
  return {{"request_id", "0123456789abcdef0123456789abcd" + std::to_string(10 + i)},
          {"caller", "somebody with a long name"},
          {"stage", stage},
          {"status", stage == "done" ? "CANCELLED: the client has gone" : ""},
          {"reuse", "sparsex"},
          {"tokens", {{"prompt", 12'345}, {"cached", 12'000}, {"completion", 512}}},
          {"seconds", {{"ttft", 0.0421}, {"total", 12.5}}},
          {"workers", {{"prefill", "prefill-0"}, {"decode", "decode-0"}}}};
}

struct Screen {
  json status, workers = {{"data", json::array()}}, requests = {{"active", json::array()}, {"recent", json::array()}};

  Screen(int num_workers, int active, int ended) {
    status = {{"model", {{"name", "splice-tiny"}, {"max_context", 16384}}},
              {"ready", true},
              {"draining", false},
              {"uptime_seconds", 77.0},
              {"version", "0.1.0"},
              {"requests", {{"running", active}, {"waiting", 0}}},
              {"pools",
               {{"prefill", {{"workers", 1}, {"draining", 0}, {"queued_tokens", 5}, {"tokens_per_second", 3000.0}}},
                {"decode",
                 {{"workers", 1},
                  {"draining", 0},
                  {"sequences", 3},
                  {"max_sequences", 256},
                  {"total_pages", 100},
                  {"free_pages", 75}}}}}};
    for (int i = 0; i < num_workers; ++i)
      workers["data"].push_back(
          {{"worker", "prefill-" + std::to_string(i)},
           {"role", "prefill"},
           {"draining", i == 1},
           {"address", "192.168.100.100:7101"},
           {"queued_tokens", 5},
           {"tokens_per_second", 3000.0},
           {"links",
            json::array({{{"decode", "decode-0"}, {"transport", "shared memory"}, {"bytes_per_second", 4e9}}})}});
    for (int i = 0; i < active; ++i) requests["active"].push_back(Request(i, "decode"));
    for (int i = 0; i < ended; ++i) requests["recent"].push_back(Request(i, "done"));
  }
  std::vector<std::string> Lines(size_t columns, size_t rows) const {
    return TopLines(status, workers, requests, {.columns = columns, .rows = rows});
  }
};

TEST(TopLinesTest, FitAnyWindow) {
  for (const int many : {0, 1, 3, 100}) {
    const Screen screen(many, many, many);
    for (const size_t columns : {1u, 20u, 40u, 80u, 120u, 200u}) {
      for (const size_t rows : {1u, 5u, 12u, 24u, 34u, 100u}) {
        const auto lines = screen.Lines(columns, rows);
        EXPECT_LE(lines.size(), rows);
        for (const std::string& line : lines) EXPECT_LE(TextColumns(line), columns) << line;
      }
    }
  }
}

TEST(TopLinesTest, UseTheWindow) {
  const Screen screen(4, 50, 50);
  EXPECT_EQ(screen.Lines(120, 34).size(), 34u) << "no row is wasted";
  const std::string narrow = Joined(screen.Lines(80, 34));
  EXPECT_THAT(narrow, HasSubstr("01234567~"));
  EXPECT_THAT(narrow, HasSubstr("CANCELLED"));
  EXPECT_THAT(narrow, HasSubstr(" more\n"));
  EXPECT_THAT(narrow, HasSubstr("12.5 s"));
  EXPECT_THAT(narrow, Not(HasSubstr("shared memory")));
  const std::string wide = Joined(screen.Lines(200, 100));
  EXPECT_THAT(wide, HasSubstr("0123456789abcdef0123456789abcd10"));
  EXPECT_THAT(wide, HasSubstr("decode-0: shared memory, 4.0 GB/s"));
  // Lists that need less leave their rows to others.
  EXPECT_THAT(Joined(Screen(1, 0, 50).Lines(80, 24)), HasSubstr("and 39 more"));
}

// The method that ran, as soon as it is known.
TEST(TopLinesTest, SayWhatRan) {
  Screen screen(1, 2, 0);
  screen.requests["active"][0]["reuse"] = "";
  screen.requests["active"][1]["ran"] = {{"reuse", "exact"}};
  const std::string shown = Joined(screen.Lines(200, 100));
  EXPECT_THAT(shown, HasSubstr(" auto "));
  EXPECT_THAT(shown, HasSubstr(" exact "));
  EXPECT_THAT(shown, Not(HasSubstr("sparsex")));
}

class ProgressLineTest : public ::testing::Test {
 protected:
  ~ProgressLineTest() override {
    std::fclose(out_);
    std::free(text_);
  }
  std::string Written() {
    std::fflush(out_);
    std::string all(text_, size_);
    const std::string fresh = all.substr(seen_);
    seen_ = all.size();
    return fresh;
  }
  ProgressLine Line(bool terminal) {
    return ProgressLine(out_, terminal, 60, [this] { return now_; });
  }

  char* text_ = nullptr;
  size_t size_ = 0, seen_ = 0;
  std::FILE* out_ = ::open_memstream(&text_, &size_);
  double now_ = 100;
};

TEST_F(ProgressLineTest, OnATerminalABarFromTwoSecondsOn) {
  auto line = Line(/*terminal=*/true);
  now_ = 101.9;
  line.Update(1, 4, "1 of 4 samples");
  EXPECT_EQ(Written(), "");
  now_ = 104;
  line.Update(2, 4, "2 of 4 samples");
  EXPECT_EQ(Written(), "\r\x1b[K[###############...............] 2 of 4 samples, 4 s left");
  now_ = 104.05;
  line.Update(3, 4, "3 of 4 samples");
  EXPECT_EQ(Written(), "") << "ten times a second";
  line.Update(4, 4, "4 of 4 samples");
  EXPECT_THAT(Written(), HasSubstr("####] 4 of 4 samples"));
  line.Finish();
  EXPECT_EQ(Written(), "\r\x1b[K");
  now_ = 106.1;
  line.Update(5, 0, std::string(200, 'x'));
  EXPECT_EQ(Written(), "\r\x1b[K" + std::string(60, 'x'));
}

TEST(StageTextTest, SaysSecondsOrHowFarItIs) {
  EXPECT_EQ(StageText("loading the weights", 0, 0, 3.2), "loading the weights: 3 s");
  EXPECT_EQ(StageText("loading the weights", 6ull << 30, 15ull << 30, 3.2),
            "loading the weights: 40 %, 6.0 GiB of 15.0 GiB");
}

TEST_F(ProgressLineTest, AStageHasABarAsSoonAsItSaysHowFarItIs) {
  double now = 100;
  std::mutex mutex;
  std::condition_variable looked;
  int looks = 0;
  {
    StageLine stage(std::make_unique<ProgressLine>(out_, /*terminal=*/true, 90, [&] {
      const std::lock_guard lock(mutex);
      ++looks;
      looked.notify_all();
      return now += 1;  // each look is a second later
    }));
    const auto wait = [&](int more) {
      std::unique_lock lock(mutex);
      const int until = looks + more;
      looked.wait(lock, [&] { return looks >= until; });
    };
    stage.Begin("loading the weights");
    stage.Update(1ull << 30, 4ull << 30);
    wait(4);
    stage.Begin("starting the workers");
    wait(4);
  }
  const std::string text = Written();
  EXPECT_THAT(text, HasSubstr("] loading the weights: 25 %, 1.0 GiB of 4.0 GiB"));
  EXPECT_THAT(text, HasSubstr("\r\x1b[Kstarting the workers: "));
  EXPECT_THAT(text, ::testing::EndsWith("\r\x1b[K"));
}

TEST_F(ProgressLineTest, ElsewhereALineEveryTenSeconds) {
  auto line = Line(/*terminal=*/false);
  for (now_ = 100; now_ < 125; now_ += 1) line.Update(static_cast<uint64_t>(now_) - 100, 50, "at work");
  line.Finish();
  EXPECT_EQ(Written(), "at work, 40 s left\nat work, 30 s left\n");
}

TEST(QualityLinesTest, ShowRecordsWithTheirVerdicts) {
  const auto lines = QualityLines(json::parse(R"({"data": [
      {"namespace": "docs", "caller": "ann", "worker": "p0", "method": "splice", "verdict": "clearly_bad",
       "quality": null, "agreement": 0.75, "agreement_low": 0.5, "comparisons": 64.2, "seconds_ago": 90},
      {"namespace": "", "caller": "", "worker": "p1", "method": "sparsex\u001b[2J", "verdict": "no_record",
       "quality": 0.99, "agreement": null, "agreement_low": null, "comparisons": 0, "seconds_ago": 0.25}]})"));
  ASSERT_EQ(lines.size(), 3u);
  for (const char* word : {"docs", "ann", "splice", "p0", "0.7500", "0.5000", "64", "clearly_bad", "90.0 s ago"})
    EXPECT_THAT(lines[1], HasSubstr(word));
  for (const char* word : {"p1", "0.9900", "no_record", "250 ms ago", " - "}) EXPECT_THAT(lines[2], HasSubstr(word));
  EXPECT_THAT(lines[2], Not(HasSubstr("\x1b"))) << "names come from callers";
  EXPECT_THAT(QualityLines(json::parse(R"({"data": []})")), ElementsAre(HasSubstr("no records yet")));
}

}  // namespace
}  // namespace spl::cli
