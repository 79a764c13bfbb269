#include "services/base/http_url.h"

#include <gtest/gtest.h>

namespace spl {
namespace {

TEST(HttpUrlTest, Parts) {
  const HttpUrl url = ParseHttpUrl("https://host:8443/a/b?c=d#e").value();
  EXPECT_TRUE(url.https);
  EXPECT_EQ(url.Origin(), "https://host:8443");
  EXPECT_EQ(url.path, "/a/b?c=d");
  EXPECT_EQ(ParseHttpUrl("https://h").value().Origin(), "https://h:443");
  EXPECT_EQ(ParseHttpUrl("http://h?x").value().path, "/?x");
  EXPECT_EQ(ParseHttpUrl("h:1/x?to=http://other").value().host, "h");
  for (const char* bad :
       {"ftp://h", "http://", "http://h:99999", "http://user@h/", "http://h/a b", "http://h/\r\nX: y"})
    EXPECT_FALSE(ParseHttpUrl(bad).ok()) << bad;
}

TEST(HttpUrlTest, Locations) {
  const HttpUrl asked = ParseHttpUrl("https://h:1/a/b?c").value();
  const auto to = [&](const char* location) {
    const HttpUrl url = ResolveLocation(asked, location).value();
    return url.Origin() + url.path;
  };
  EXPECT_EQ(to("http://other/x"), "http://other:80/x");
  EXPECT_EQ(to("//other/x"), "https://other:443/x");
  EXPECT_EQ(to("/x?y"), "https://h:1/x?y");
  EXPECT_EQ(to("x"), "https://h:1/a/x");
  EXPECT_FALSE(ResolveLocation(asked, "file:///etc/passwd").ok());
}

}  // namespace
}  // namespace spl
