// --help: what must be given comes first, and no line is longer than the window.
#include "services/base/help_formatter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

namespace spl {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class HelpFormatterTest : public ::testing::Test {
 protected:
  HelpFormatterTest() {
    app_.formatter(std::make_shared<HelpFormatter>(70));
    app_.option_defaults()->group("Essential");
    app_.add_option("--http", text_, "address of the API, with words enough for a second line of the help");
    app_.option_defaults()->group("More");
    app_.add_option("--mode", text_, "how it runs")->check(CLI::IsMember({"fast", "slow"}));
    app_.add_option("--secret", text_, "not for people")->group("");
    auto* group = app_.add_option_group("model");
    group->add_option("--model", text_, "a folder");
    group->add_option("--random", text_, "none");
    group->require_option(1);
    app_.footer("The end");
  }
  static size_t LongestLine(const std::string& text) {
    std::istringstream lines(text);
    size_t longest = 0;
    for (std::string line; std::getline(lines, line);) longest = std::max(longest, line.size());
    return longest;
  }

  std::string text_;
  CLI::App app_{"Serves", "serve"};
};

TEST_F(HelpFormatterTest, ShowsWhatMustBeGivenThenGroupsThenHelp) {
  EXPECT_EQ(app_.help(),
            "Serves\n"
            "Usage: serve [OPTIONS]\n"
            "\n"
            "Model (exactly one of them):\n"
            "  --model TEXT                a folder\n"
            "  --random TEXT               none\n"
            "\n"
            "Essential:\n"
            "  --http TEXT                 address of the API, with words enough\n"
            "                              for a second line of the help\n"
            "\n"
            "More:\n"
            "  --mode {fast,slow}          how it runs\n"
            "\n"
            "Options:\n"
            "  -h,--help                   Print this help message and exit\n"
            "\n"
            "The end\n");
}

TEST_F(HelpFormatterTest, WrapsLongDescriptionsAndLeavesLinesOfTheirOwn) {
  app_.add_option("--an-option-with-a-name-that-fills-its-column", text_,
                  "first line\nsecond line, which is long enough to be broken where a space is");
  const std::string help = app_.help();
  EXPECT_LE(LongestLine(help), 70u) << help;
  EXPECT_THAT(help, HasSubstr("\n                              first line\n"
                              "                              second line, which is long enough to be\n"
                              "                              broken where a space is\n"));
  EXPECT_THAT(help, Not(HasSubstr("--secret")));
}

TEST_F(HelpFormatterTest, ListsSubcommandsWhichInheritIt) {
  CLI::App* const below = app_.add_subcommand("below", "Does a part");
  below->add_option_group("source")->add_option("--from", text_, "where from");
  EXPECT_THAT(app_.help(), HasSubstr("\nSubcommands:\n  below                       Does a part\n"));
  EXPECT_THAT(below->help(), HasSubstr("\nSource:\n  --from TEXT                 where from\n"));
}

}  // namespace
}  // namespace spl
