#include "services/membership/membership.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "services/membership/member_json.h"
#include "services/membership/static_list.h"
#include "tests/services/membership/watcher.h"

namespace spl::membership {
namespace {

using ::testing::ElementsAre;

TEST(SpecTest, NamesItsBackEnd) {
  EXPECT_EQ(ParseSpec("static")->kind, Spec::Kind::kStatic);
  const auto etcd = ParseSpec("etcd://10.0.0.1:2379,[::1]:2379/prod/splice/");
  ASSERT_TRUE(etcd.ok()) << etcd.status();
  EXPECT_EQ(etcd->kind, Spec::Kind::kEtcd);
  EXPECT_THAT(etcd->endpoints, ElementsAre("10.0.0.1:2379", "[::1]:2379"));
  EXPECT_EQ(etcd->prefix, "/prod/splice");
  EXPECT_EQ(ParseSpec("etcd://a:1")->prefix, "/splice");
  const auto kubernetes = ParseSpec("kubernetes://prod/splice");
  ASSERT_TRUE(kubernetes.ok()) << kubernetes.status();
  EXPECT_EQ(kubernetes->name_space, "prod");
  EXPECT_EQ(kubernetes->service, "splice");
}

TEST(SpecTest, RefusesWhatIsNone) {
  for (const char* text :
       {"", "etcd", "etcd://", "etcd://host", "etcd://a:1,,b:2", "etcd://a:1/", "etcd://a:99999", "kubernetes://a",
        "kubernetes:///b", "kubernetes://a/b/c", "kubernetes://A/b", "kubernetes://a/b?x=1", "consul://a:1"}) {
    EXPECT_EQ(ParseSpec(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(MemberJsonTest, RoundTrip) {
  const Member member{.role = Role::kDecode,
                      .address = "[::1]:7102",
                      .worker_id = "decode-\"0\"",
                      .epoch = UINT64_MAX,
                      .fingerprint = "ab12",
                      .head_map = "cd",
                      .capacity = 123456,
                      .wire_min = 1,
                      .wire_max = 2};
  const auto read = MemberFromJson(ToJson(member));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, member);
  // A newer program's fields are of no interest, an older one's absence neither.
  const auto other = MemberFromJson(R"({"role":"prefill","address":"a:1","zone":{"x":[1]}})");
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ(*other, (Member{.role = Role::kPrefill, .address = "a:1"}));
}

TEST(MemberJsonTest, RefusesWhatIsNone) {
  for (const std::string text : {"", "[]", "{", R"({"role":"store","address":"a:1"})", R"({"role":"decode"})",
                                 R"({"role":"decode","address":"a"})", R"({"role":"decode","address":5})",
                                 R"({"role":"decode","address":"a:1","epoch":-1})",
                                 R"({"role":"decode","address":"a:1","wire_min":4294967296})"})
    EXPECT_EQ(MemberFromJson(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  EXPECT_FALSE(MemberFromJson(R"({"role":"decode","address":"a:1","x":")" + std::string(20'000, 'x') + "\"}").ok());
}

TEST(StaticListTest, IsThereAtOnceAndSorted) {
  auto list = MakeStaticList({"b:1", "a:1", "b:1"}, {"a:2"});
  Watcher watcher;
  list->Start(watcher.callback());
  EXPECT_EQ(watcher.members(), (Members{{.role = Role::kPrefill, .address = "a:1"},
                                        {.role = Role::kPrefill, .address = "b:1"},
                                        {.role = Role::kDecode, .address = "a:2"}}));
  list->Stop();
}

}  // namespace
}  // namespace spl::membership
