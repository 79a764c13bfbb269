#include "services/router/admission/auth.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

namespace spl::router {
namespace {

class AuthTest : public ::testing::Test {
 protected:
  std::string File(const std::string& text) {
    path_ = std::filesystem::temp_directory_path() / ("splice-auth-" + std::to_string(getpid()));
    std::ofstream(path_) << text;
    return path_;
  }
  void TearDown() override { std::filesystem::remove(path_); }
  std::string path_ = "none";
};

TEST_F(AuthTest, WithoutKeysEveryoneIsAnonymous) { EXPECT_EQ(ApiKeys().Authenticate("").value().name, "anonymous"); }

TEST_F(AuthTest, KeysHaveNames) {
  const ApiKeys keys = ApiKeys::Load(File("# comment\n\nk-1 alice cooper\n  k-2  \n")).value();
  EXPECT_EQ(keys.Authenticate("Bearer k-1").value().name, "alice cooper");
  // RFC 9110: the scheme's case does not matter.
  for (const char* header : {"bearer k-1", "BEARER k-1"})
    EXPECT_EQ(keys.Authenticate(header).value().name, "alice cooper") << header;
  EXPECT_EQ(keys.Authenticate("Bearer k-2").value().name.substr(0, 4), "key-");
  for (const char* header : {"", "k-1", "Basic k-1", "Bearer", "Bearer ", "Bearer k-3", "Bearer k-1x"}) {
    EXPECT_EQ(keys.Authenticate(header).status().code(), absl::StatusCode::kUnauthenticated) << header;
  }
}

TEST_F(AuthTest, BadKeyFilesAreRefused) {
  EXPECT_FALSE(ApiKeys::Load("/does/not/exist").ok());
  EXPECT_THAT(ApiKeys::Load(File("# nothing\n")).status().ToString(), ::testing::HasSubstr("holds no key"));
  EXPECT_THAT(ApiKeys::Load(File("a\nb\na\n")).status().ToString(), ::testing::HasSubstr(":3:"));
}

TEST_F(AuthTest, LimitsStandBehindTheName) {
  const ApiKeys keys =
      ApiKeys::Load(File("k-1 alice cooper rpm=60 tpm=100000 concurrent=4 weight=2.5\nk-2 rpm=1\nk-3 a=b rpm=2\n"))
          .value();
  const Caller alice = keys.Authenticate("Bearer k-1").value();
  EXPECT_EQ(alice.name, "alice cooper");
  EXPECT_EQ(alice.limits.requests_per_minute, 60u);
  EXPECT_EQ(alice.limits.tokens_per_minute, 100'000u);
  EXPECT_EQ(alice.limits.max_concurrent, 4u);
  EXPECT_EQ(alice.weight, 2.5);
  EXPECT_EQ(keys.Authenticate("Bearer k-2").value().name.substr(0, 4), "key-");
  EXPECT_EQ(keys.Authenticate("Bearer k-3").value().name, "a=b") << "an unknown word is part of the name";
  for (const char* bad : {"k a rpm=0", "k a rpm=-1", "k a rpm=1x", "k a weight=0", "k a weight=1e9", "k a tpm="}) {
    EXPECT_FALSE(ApiKeys::Load(File(bad)).ok()) << bad;
  }
}

TEST_F(AuthTest, AChangedFileIsReadAgain) {
  ApiKeys keys = ApiKeys::Load(File("k-1 a\n")).value();
  EXPECT_FALSE(keys.ReloadIfChanged().value());
  File("k-22 b\n");
  EXPECT_TRUE(keys.ReloadIfChanged().value());
  EXPECT_FALSE(keys.Authenticate("Bearer k-1").ok());
  EXPECT_EQ(keys.Authenticate("Bearer k-22").value().name, "b");
  File("");
  EXPECT_FALSE(keys.ReloadIfChanged().ok());
  EXPECT_TRUE(keys.Authenticate("Bearer k-22").ok()) << "the old keys stay";
  EXPECT_FALSE(keys.ReloadIfChanged().value()) << "said once";
}

TEST_F(AuthTest, SecretMustBeLongEnough) { EXPECT_FALSE(NamespaceKeys::Load(File("short\n")).ok()); }

// Caller and name, in whatever way they are cut, never derive the same key.
TEST_F(AuthTest, NamespaceKeysSeparateCallersAndNames) {
  const NamespaceKeys secret = NamespaceKeys::Load(File("0123456789abcdef\n")).value();
  std::set<chunk::Digest> seen;
  for (const NamespaceKeys& keys : {NamespaceKeys(), secret}) {
    for (const char* caller : {"", "a", "ab", "abc"}) {
      for (const char* name : {"", "c", "bc", "abc"}) {
        EXPECT_TRUE(seen.insert(keys.Derive({.name = caller, .secret = caller}, name)).second) << caller << "/" << name;
      }
    }
  }
}

// No name of a namespace, however chosen, derives the key of a knowledge base or of the caller itself.
TEST_F(AuthTest, KnowledgeBasesAndOwnersAreApartFromNamespaces) {
  const NamespaceKeys secret = NamespaceKeys::Load(File("0123456789abcdef\n")).value();
  for (const NamespaceKeys& keys : {NamespaceKeys(), secret}) {
    std::set<chunk::Digest> seen;
    for (const char* caller : {"", "a", "ab", "a/owner", "a/knowledge-base"}) {
      const Caller who{.name = caller, .secret = caller};
      EXPECT_TRUE(seen.insert(keys.DeriveOwner(who)).second) << caller;
      for (const char* name : {"", "b", "ab", "1", "kb/b/1", "b/1", "/owner", "/knowledge-base"}) {
        EXPECT_TRUE(seen.insert(keys.Derive(who, name)).second) << caller << "/" << name;
        for (const uint64_t version : {1, 11}) {
          EXPECT_TRUE(seen.insert(keys.DeriveKnowledgeBase(who, name, version)).second) << caller << "/" << name;
        }
      }
    }
  }
}

TEST_F(AuthTest, PublicNamespacesAreTheSameForAllWhoHaveASecretInCommon) {
  const NamespaceKeys secret = NamespaceKeys::Load(File("0123456789abcdef\n")).value();
  const Caller a{.name = "a", .secret = "key a"}, b{.name = "b", .secret = "key b"}, nobody{.name = ""};
  EXPECT_EQ(secret.Derive(a, "public/docs"), secret.Derive(b, "public/docs"));
  EXPECT_NE(secret.Derive(a, "public/docs"), secret.Derive(a, "public/other"));
  EXPECT_NE(secret.Derive(a, "public/docs"), secret.Derive(a, "docs"));
  EXPECT_NE(secret.Derive(a, "public/docs"), secret.Derive(nobody, "docs"));
  EXPECT_NE(secret.Derive(a, "public"), secret.Derive(b, "public"));
  EXPECT_TRUE(secret.can_share(a));
  EXPECT_NE(NamespaceKeys().Derive(a, "public/docs"), NamespaceKeys().Derive(b, "public/docs"));
  EXPECT_FALSE(NamespaceKeys().can_share(a));
  EXPECT_TRUE(NamespaceKeys().can_share(nobody)) << "an open cluster has one space";
}

TEST_F(AuthTest, NamespaceKeysAreStable) {
  const auto hex = [](const chunk::Digest& d) {
    std::string out;
    for (const uint8_t byte : d) out += fmt::format("{:02x}", byte);
    return out;
  };
  // Changing this derivation makes every warm store cold.
  EXPECT_EQ(hex(NamespaceKeys().Derive({.name = "anonymous"}, "")), hex(NamespaceKeys().Derive({.name = "other"}, "")));
  EXPECT_EQ(hex(NamespaceKeys().Derive({.name = "anonymous"}, "docs")),
            "777cde8585f39282871367aeac88f8267bd85335115cb3b9f513b6174a097e6a");
}

}  // namespace
}  // namespace spl::router
