// Against a real etcd.
#include "services/membership/etcd.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <fstream>

#include "etcd/v3/rpc.grpc.pb.h"
#include "services/membership/member_json.h"
#include "tests/services/membership/watcher.h"
#include "tests/support/certificates.h"
#include "tests/support/etcd_process.h"
#include "tests/support/tcp_forwarder.h"
#include "tests/support/temp_dir.h"

namespace spl::membership {
namespace {

using spl::testing::EtcdProcess;
using spl::testing::TcpForwarder;
using namespace std::chrono_literals;
namespace etcd = etcdserverpb;

Member Worker(const std::string& id, Role role = Role::kDecode) {
  return {.role = role,
          .address = "127.0.0.1:" + std::to_string(1000 + id.size() * 100 + id.back()),
          .worker_id = id,
          .epoch = 7,
          .capacity = 100,
          .wire_min = 1,
          .wire_max = 1};
}

class EtcdTest : public ::testing::Test {
 protected:
  void SetUp() override {
    UseEtcd(EtcdProcess::Start(dir_.path() + "/etcd"));
  }

  void UseEtcd(std::unique_ptr<EtcdProcess> etcd) {
    ASSERT_NE(etcd, nullptr);
    etcd_ = std::move(etcd);
    options_.endpoints = {etcd_->endpoint()};
    options_.prefix = "/test";
    options_.lease_ttl = 2s;  // the least that etcd grants
    options_.absent_grace = 4s;
  }

  void Put(const Member& member, int64_t lease = 0) {
    etcd::PutRequest request;
    request.set_key("/test/members/" + std::string(RoleName(member.role)) + "/" + member.worker_id);
    request.set_value(ToJson(member));
    request.set_lease(lease);
    Call<etcd::KV, etcd::PutResponse>(request, &etcd::KV::Stub::Put);
  }
  template <typename Service, typename Response, typename Request, typename Method>
  Response Call(const Request& request, Method method) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + 10s);
    Response response;
    const auto stub = Service::NewStub(etcd_->Connect());
    const grpc::Status status = ((*stub).*method)(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }

  spl::testing::TempDir dir_;
  std::unique_ptr<EtcdProcess> etcd_;
  EtcdOptions options_;
};

TEST_F(EtcdTest, WorkersComeAndGo) {
  auto discovery = MakeEtcdDiscovery(options_);
  Watcher watcher;
  discovery->Start(watcher.callback());
  ASSERT_TRUE(watcher.WaitForSize(0));
  auto d0 = MakeEtcdRegistration(options_, Worker("d0"));
  ASSERT_TRUE(watcher.WaitForSize(1));
  EXPECT_EQ(watcher.members()[0], Worker("d0"));
  auto p0 = MakeEtcdRegistration(options_, Worker("p0", Role::kPrefill));
  ASSERT_TRUE(watcher.WaitForSize(2));
  // Another router that starts later reads the same list.
  Watcher second;
  auto other = MakeEtcdDiscovery(options_);
  other->Start(second.callback());
  ASSERT_TRUE(second.WaitForSize(2));
  d0->Stop();
  ASSERT_TRUE(watcher.WaitForSize(1));
  EXPECT_EQ(watcher.members()[0].worker_id, "p0");
  ASSERT_TRUE(second.WaitForSize(1));
  // What somebody else has written there is not a member, and does no harm.
  etcd::PutRequest bad;
  bad.set_key("/test/members/decode/x");
  bad.set_value("not a member");
  Call<etcd::KV, etcd::PutResponse>(bad, &etcd::KV::Stub::Put);
  Put(Worker("d1"));
  ASSERT_TRUE(watcher.WaitForSize(2));
}

TEST_F(EtcdTest, ALeaseIsRenewedAndEndsWithItsHolder) {
  auto discovery = MakeEtcdDiscovery(options_);
  Watcher watcher;
  discovery->Start(watcher.callback());
  auto alive = MakeEtcdRegistration(options_, Worker("d0"));
  ASSERT_TRUE(watcher.WaitForSize(1));
  // A worker that hangs: it has a lease and renews it no more.
  etcd::LeaseGrantRequest grant;
  grant.set_ttl(2);
  const auto lease = Call<etcd::Lease, etcd::LeaseGrantResponse>(grant, &etcd::Lease::Stub::LeaseGrant);
  Put(Worker("d1"), lease.id());
  ASSERT_TRUE(watcher.WaitForSize(2));
  ASSERT_TRUE(watcher.WaitForSize(1));
  EXPECT_EQ(watcher.members()[0].worker_id, "d0");
}

TEST_F(EtcdTest, ARestartChangesNothingAndTheWatchGoesOn) {
  auto discovery = MakeEtcdDiscovery(options_);
  Watcher watcher;
  discovery->Start(watcher.callback());
  auto d0 = MakeEtcdRegistration(options_, Worker("d0"));
  ASSERT_TRUE(watcher.WaitForSize(1));
  watcher.TakeLeast();
  etcd_->Kill();
  ASSERT_TRUE(etcd_->Restart());
  Put(Worker("d1"));
  ASSERT_TRUE(watcher.WaitForSize(2));
  EXPECT_EQ(watcher.TakeLeast(), 1u) << "the list was never empty";
}

TEST_F(EtcdTest, AnEtcdThatLostItsDataCostsNoWorker) {
  auto discovery = MakeEtcdDiscovery(options_);
  Watcher watcher;
  discovery->Start(watcher.callback());
  auto d0 = MakeEtcdRegistration(options_, Worker("d0"));
  Put(Worker("gone"));
  ASSERT_TRUE(watcher.WaitForSize(2));
  watcher.TakeLeast();
  etcd_->Kill();
  etcd_->Erase();
  ASSERT_TRUE(etcd_->Restart());
  // The one that has ended meanwhile goes after its grace, the one that lives has registered again.
  ASSERT_TRUE(watcher.WaitForSize(1));
  EXPECT_EQ(watcher.members()[0].worker_id, "d0");
  EXPECT_EQ(watcher.TakeLeast(), 1u) << "the list was never empty";
  Put(Worker("d1"));
  ASSERT_TRUE(watcher.WaitForSize(2)) << "the new store is watched";
}

TEST_F(EtcdTest, ACompactedRevisionIsListedAnew) {
  TcpForwarder link(etcd_->endpoint());
  options_.absent_grace = 100ms;
  EtcdOptions through_link = options_;
  through_link.endpoints = {link.address()};
  auto discovery = MakeEtcdDiscovery(through_link);
  Watcher watcher;
  discovery->Start(watcher.callback());
  Put(Worker("d0"));
  Put(Worker("d1"));
  ASSERT_TRUE(watcher.WaitForSize(2));
  link.Cut();
  etcd::DeleteRangeRequest remove;
  remove.set_key("/test/members/decode/d0");
  const auto removed = Call<etcd::KV, etcd::DeleteRangeResponse>(remove, &etcd::KV::Stub::DeleteRange);
  Put(Worker("d2"));
  Put(Worker("d3"));
  etcd::CompactionRequest compact;
  compact.set_revision(removed.header().revision() + 1);
  Call<etcd::KV, etcd::CompactionResponse>(compact, &etcd::KV::Stub::Compact);
  link.Mend();
  ASSERT_TRUE(watcher.WaitForSize(3));
  std::vector<std::string> ids;
  for (const Member& member : watcher.members()) ids.push_back(member.worker_id);
  EXPECT_THAT(ids, ::testing::UnorderedElementsAre("d1", "d2", "d3"));
}

TEST_F(EtcdTest, AnAddressThatIsGoneIsPassedOver) {
  TcpForwarder first(etcd_->endpoint());
  options_.endpoints = {first.address(), etcd_->endpoint()};
  options_.call_timeout = 500ms;
  auto discovery = MakeEtcdDiscovery(options_);
  Watcher watcher;
  discovery->Start(watcher.callback());
  auto d0 = MakeEtcdRegistration(options_, Worker("d0"));
  ASSERT_TRUE(watcher.WaitForSize(1));
  watcher.TakeLeast();
  first.Cut();
  Put(Worker("d1"));
  ASSERT_TRUE(watcher.WaitForSize(2));
  // Longer than a lease: the registration has found the other address, too.
  EXPECT_FALSE(watcher.WaitFor([](const Members& m) { return m.size() < 2; }, 4s));
}

TEST_F(EtcdTest, EndsWhileEtcdHangs) {
  auto discovery = MakeEtcdDiscovery(options_);
  Watcher watcher;
  discovery->Start(watcher.callback());
  auto d0 = MakeEtcdRegistration(options_, Worker("d0"));
  ASSERT_TRUE(watcher.WaitForSize(1));
  etcd_->Signal(SIGSTOP);
  const auto start = std::chrono::steady_clock::now();
  d0->Stop();
  discovery->Stop();
  EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
  etcd_->Signal(SIGCONT);
}

// etcd with TLS, which wants a certificate of its clients, and with users.
class GuardedEtcdTest : public EtcdTest {
 protected:
  void SetUp() override {
    server_ = ca_.IssueFiles(dir_.path(), "etcd");
    const PeerTlsOptions own = ca_.IssueFiles(dir_.path(), "worker");
    options_.access = {.ca_file = own.ca_file, .cert_file = own.cert_file, .key_file = own.key_file};
    UseEtcd(EtcdProcess::Start(dir_.path() + "/etcd", server_));
  }

  void WritePassword(const std::string& password) {
    std::ofstream(dir_.path() + "/password") << password << "\n";
    options_.access.user = "splice";
    options_.access.password_file = dir_.path() + "/password";
  }
  // root, and the user splice, who may read and write below /test/.
  void AddUsers() {
    for (const auto& [name, password] : {std::pair{"root", "r"}, std::pair{"splice", "s"}}) {
      etcd::AuthUserAddRequest user;
      user.set_name(name);
      user.set_password(password);
      Call<etcd::Auth, etcd::AuthUserAddResponse>(user, &etcd::Auth::Stub::UserAdd);
      etcd::AuthRoleAddRequest role;
      role.set_name(name);
      Call<etcd::Auth, etcd::AuthRoleAddResponse>(role, &etcd::Auth::Stub::RoleAdd);
      etcd::AuthUserGrantRoleRequest grant;
      grant.set_user(name);
      grant.set_role(name);
      Call<etcd::Auth, etcd::AuthUserGrantRoleResponse>(grant, &etcd::Auth::Stub::UserGrantRole);
    }
    etcd::AuthRoleGrantPermissionRequest permission;
    permission.set_name("splice");
    permission.mutable_perm()->set_permtype(etcd::Permission::READWRITE);
    permission.mutable_perm()->set_key("/test/");
    permission.mutable_perm()->set_range_end("/test0");
    Call<etcd::Auth, etcd::AuthRoleGrantPermissionResponse>(permission, &etcd::Auth::Stub::RoleGrantPermission);
    Call<etcd::Auth, etcd::AuthEnableResponse>(etcd::AuthEnableRequest(), &etcd::Auth::Stub::AuthEnable);
  }

  const test::TestCa ca_{"etcd's CA"};
  PeerTlsOptions server_;
};

TEST_F(GuardedEtcdTest, WithTlsWorkersComeAndGo) {
  ASSERT_EQ(options_.access.Check(), absl::OkStatus());
  auto discovery = MakeEtcdDiscovery(options_);
  Watcher watcher;
  discovery->Start(watcher.callback());
  auto d0 = MakeEtcdRegistration(options_, Worker("d0"));
  ASSERT_TRUE(watcher.WaitForSize(1));
  // Renewed beyond its lease, and found again after a restart.
  etcd_->Kill();
  ASSERT_TRUE(etcd_->Restart());
  auto d1 = MakeEtcdRegistration(options_, Worker("d1"));
  ASSERT_TRUE(watcher.WaitForSize(2));
  d0->Stop();
  ASSERT_TRUE(watcher.WaitForSize(1));
}

// Whoever cannot prove who it is gets nothing; an etcd of another CA is believed nothing.
TEST_F(GuardedEtcdTest, StrangersAreKeptOut) {
  const test::TestCa other("another CA");
  const PeerTlsOptions stranger = other.IssueFiles(dir_.path(), "stranger");
  auto discovery = MakeEtcdDiscovery(options_);
  Watcher watcher;
  discovery->Start(watcher.callback());
  ASSERT_TRUE(watcher.WaitForSize(0));
  std::vector<std::unique_ptr<Registration>> kept_out;
  for (const EtcdAccessOptions& access :
       {EtcdAccessOptions{}, EtcdAccessOptions{.ca_file = options_.access.ca_file},
        EtcdAccessOptions{.ca_file = stranger.ca_file, .cert_file = stranger.cert_file, .key_file = stranger.key_file},
        EtcdAccessOptions{
            .ca_file = options_.access.ca_file, .cert_file = stranger.cert_file, .key_file = stranger.key_file}}) {
    EtcdOptions options = options_;
    options.access = access;
    kept_out.push_back(MakeEtcdRegistration(options, Worker("s" + std::to_string(kept_out.size()))));
  }
  auto d0 = MakeEtcdRegistration(options_, Worker("d0"));
  ASSERT_TRUE(watcher.WaitForSize(1));
  // Two leases long: those who register do it within milliseconds.
  EXPECT_FALSE(watcher.WaitFor([](const Members& members) { return members.size() > 1; }, 4s));
  EXPECT_EQ(watcher.members()[0].worker_id, "d0");
}

TEST_F(GuardedEtcdTest, AUserLogsInAndAgainWhenItsTokenIsGone) {
  AddUsers();
  WritePassword("wrong");
  auto discovery = MakeEtcdDiscovery(options_);
  Watcher watcher;
  discovery->Start(watcher.callback());
  auto d0 = MakeEtcdRegistration(options_, Worker("d0"));
  EXPECT_FALSE(watcher.WaitFor([](const Members&) { return true; }, 1s))
      << "with a wrong password there is not even an empty list";
  WritePassword("s");  // it is read again
  ASSERT_TRUE(watcher.WaitForSize(1));
  // Simple tokens are in memory: a restart forgets them.
  etcd_->Kill();
  ASSERT_TRUE(etcd_->Restart());
  auto d1 = MakeEtcdRegistration(options_, Worker("d1"));
  ASSERT_TRUE(watcher.WaitForSize(2));
  d0->Stop();
  d1->Stop();
  ASSERT_TRUE(watcher.WaitForSize(0)) << "leases are given back with the token, too";
}

TEST(EtcdAccessTest, FlagsThatDoNotFitAreRefused) {
  spl::testing::TempDir dir;
  const test::TestCa ca("CA");
  const PeerTlsOptions own = ca.IssueFiles(dir.path(), "own"), other = ca.IssueFiles(dir.path(), "other");
  const auto message = [](const EtcdAccessOptions& access) { return std::string(access.Check().message()); };
  using ::testing::HasSubstr;
  EXPECT_EQ(message({}), "");
  EXPECT_EQ(message({.ca_file = own.ca_file}), "");
  EXPECT_THAT(message({.ca_file = own.ca_file, .cert_file = own.cert_file}), HasSubstr("--etcd-key: give both"));
  EXPECT_THAT(message({.cert_file = own.cert_file, .key_file = own.key_file}), HasSubstr("needs --etcd-ca"));
  EXPECT_THAT(message({.ca_file = "/nowhere"}), HasSubstr("--etcd-ca /nowhere"));
  EXPECT_THAT(message({.ca_file = own.ca_file, .cert_file = own.cert_file, .key_file = other.key_file}),
              HasSubstr("--etcd-key"));
  EXPECT_THAT(message({.user = "u"}), HasSubstr("--etcd-password-file: give both"));
  EXPECT_THAT(message({.user = "u", .password_file = "/nowhere"}), HasSubstr("/nowhere cannot be read"));
}

}  // namespace
}  // namespace spl::membership
