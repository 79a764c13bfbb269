// The files of the operators' page as a browser gets them.
#include "services/router/http/ui_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>

#include "tests/support/fake_cluster.h"
#include "tests/support/http_test_client.h"

namespace spl::router {
namespace {

using testing::Call;
using testing::FakeCluster;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::TestResponse;

class UiFilesTest : public ::testing::Test {
 protected:
  UiFilesTest() : cluster_(1, 1) { cluster_.StartRouter(); }
  TestResponse Get(const std::string& path, const std::vector<std::string>& headers = {}) {
    return Call(cluster_.http(), "GET", path, "", headers);
  }

  FakeCluster cluster_;
};

TEST_F(UiFilesTest, TypesAndPolicy) {
  for (const auto& [path, type] : {std::pair("/ui", "text/html; charset=utf-8"),
                                   {"/ui/", "text/html; charset=utf-8"},
                                   {"/ui/page.css", "text/css; charset=utf-8"},
                                   {"/ui/app.js", "text/javascript; charset=utf-8"},
                                   {"/ui/icon.svg", "image/svg+xml"}}) {
    TestResponse file = Get(path);
    ASSERT_EQ(file.status, 200) << path;
    EXPECT_EQ(file.headers["content-type"], type) << path;
    EXPECT_EQ(file.headers["x-content-type-options"], "nosniff") << path;
    EXPECT_EQ(file.headers["cache-control"], "no-cache") << path;
    const std::string policy = file.headers["content-security-policy"];
    EXPECT_THAT(policy, HasSubstr("default-src 'none'; script-src 'self'; style-src 'self'"));
    EXPECT_THAT(policy, HasSubstr("frame-ancestors 'none'"));
    EXPECT_THAT(policy, Not(HasSubstr("unsafe")));
  }
}

TEST_F(UiFilesTest, AFileThatTheBrowserHasIsNotSentAgain) {
  TestResponse first = Get("/ui/app.js");
  const std::string etag = first.headers["etag"];
  ASSERT_EQ(etag.size(), 18u) << etag;
  for (const std::string& known : {etag, "\"other\", W/" + etag, std::string("*")}) {
    TestResponse again = Get("/ui/app.js", {"if-none-match: " + known});
    EXPECT_EQ(again.status, 304) << known;
    EXPECT_EQ(again.body, "");
    EXPECT_EQ(again.headers["etag"], etag);
  }
  EXPECT_EQ(Get("/ui/app.js", {"if-none-match: \"0000000000000000\""}).body, first.body);
  EXPECT_NE(Get("/ui/api.js").headers["etag"], etag);
}

// A connection is still usable behind a 304: no byte of a body was sent.
TEST_F(UiFilesTest, A304LeavesTheConnectionInOrder) {
  testing::HttpTestClient client(cluster_.http());
  const std::string etag = client.Call("GET", "/ui").headers["etag"];
  EXPECT_EQ(client.Call("GET", "/ui", "", {"if-none-match: " + etag}).status, 304);
  EXPECT_EQ(client.Call("GET", "/ui/app.js").status, 200);
}

TEST_F(UiFilesTest, NothingElseIsThere) {
  for (const char* path : {"/ui/nothing.js", "/ui/../main.cc", "/ui/page.html/x", "/ui//"}) {
    EXPECT_EQ(Get(path).status, 404) << path;
  }
  EXPECT_EQ(Call(cluster_.http(), "POST", "/ui", "{}").status, 405);
  EXPECT_EQ(Call(cluster_.http(), "DELETE", "/ui/app.js").status, 405);
}

// Every file that a file names is one of them, and none comes from elsewhere.
TEST(UiFilesListTest, NameEachOther) {
  const std::regex imported(R"re((?:from '\./|src="/ui/|href="/ui/)([a-z.]+)['"])re"),
      elsewhere(R"(https?://(?!www\.w3\.org/))");
  size_t count = 0;
  for (const UiFile& file : UiFiles()) {
    const std::string text(file.body);
    EXPECT_FALSE(std::regex_search(text, elsewhere)) << file.name;
    EXPECT_FALSE(std::regex_search(text, std::regex("innerHTML|document\\.write|eval\\(|style=\""))) << file.name;
    for (std::sregex_iterator it(text.begin(), text.end(), imported), end; it != end; ++it, ++count) {
      const std::string name = (*it)[1];
      const auto files = UiFiles();
      EXPECT_TRUE(std::any_of(files.begin(), files.end(), [&](const UiFile& f) { return f.name == name; }))
          << file.name << " names " << name;
    }
  }
  EXPECT_GT(count, 15u);
}

}  // namespace
}  // namespace spl::router
