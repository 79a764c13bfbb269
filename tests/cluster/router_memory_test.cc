// A router in 1 GiB: 4,096 half-sent bodies, 12 clients that do not read, 3,000 gRPC connections on which nothing
// happens, and one client that behaves and is answered.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <nlohmann/json.hpp>

#include "services/base/open_files.h"
#include "tests/cluster/processes.h"
#include "tests/support/eventually.h"
#include "tests/support/fake_workers.h"
#include "tests/support/http_test_client.h"
#include "tests/support/paths.h"

namespace spl::test {
namespace {

using nlohmann::json;
using spl::testing::FakeDecode;
using spl::testing::FakePrefill;
using spl::testing::HttpTestClient;
using spl::testing::TestResponse;

constexpr int kHalfSent = 4096, kUnread = 12, kGrpcIdle = 3000;
constexpr size_t kSentOfEach = 400'000;  // 1.5 GiB in all, of bodies that would be 30 GiB
constexpr uint64_t kLimit = 1ull << 30;

// The client's half of HTTP/2's beginning: the preface and an empty SETTINGS frame.
const std::string kHttp2Preface =
    std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") + std::string("\0\0\0\4\0\0\0\0\0", 9);

class RouterMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    RaiseOpenFileLimit();
    rlimit limit{};
    ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    if (limit.rlim_cur < 2 * (kHalfSent + kGrpcIdle))
      GTEST_SKIP() << "only " << limit.rlim_cur << " files may be open here";
    router_ = Process::StartAndWaitReady({BinDir() + "/splice-router", "--model", kTinyModel, "--http", "127.0.0.1:0",
                                          "--grpc", "127.0.0.1:0", "--prefill", prefill_.address(), "--decode",
                                          decode_.address()});
    ASSERT_NE(router_, nullptr);
    ASSERT_TRUE(Eventually([&] { return HttpGet(http(), "/readyz").status == 200; }));
  }
  std::string http() const { return router_->ready("http"); }
  HttpTestClient& Open(const std::string& address) {
    clients_.push_back(std::make_unique<HttpTestClient>(address));
    most_ = std::max(most_, router_->ResidentBytes());
    return *clients_.back();
  }
  // One that comes again when it is told to, as the usual client libraries do.
  bool Answered(const std::string& body) {
    return Eventually(
        [&] {
          const TestResponse answer = spl::testing::Call(http(), "POST", "/v1/completions", body);
          most_ = std::max(most_, router_->ResidentBytes());
          return answer.status == 200;
        },
        std::chrono::seconds(10));
  }

  spl::testing::FakeFabric fabric_;
  FakePrefill prefill_{fabric_, {.worker_id = "p0"}};
  FakeDecode decode_{fabric_, {.worker_id = "d0"}};
  std::unique_ptr<Process> router_;
  std::vector<std::unique_ptr<HttpTestClient>> clients_;
  uint64_t most_ = 0;
};

TEST_F(RouterMemoryTest, HoldsOutIn1GiB) {
  for (int i = 0; i < kGrpcIdle; ++i) Open(router_->ready("grpc")).Send(kHttp2Preface);
  std::printf("%d gRPC connections: %.0f MiB\n", kGrpcIdle, static_cast<double>(most_) / (1 << 20));
  std::string text;
  while (text.size() < 200'000) text += "some words of a text ";
  const std::string unread = json{{"prompt", text}, {"return_token_strs", true}}.dump();
  for (int i = 0; i < kUnread; ++i) Open(http()).SendRequest("POST", "/tokenize", unread);
  std::printf("%d unread answers: %.0f MiB\n", kUnread, static_cast<double>(most_) / (1 << 20));
  const std::string half =
      "POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 8000000\r\n\r\n" + std::string(kSentOfEach, ' ');
  for (int i = 0; i < kHalfSent; ++i) Open(http()).Send(half);
  std::printf("%d half-sent bodies: %.0f MiB\n", kHalfSent, static_cast<double>(most_) / (1 << 20));
  EXPECT_TRUE(Answered(R"({"prompt":"hello","max_tokens":4})"));
  EXPECT_TRUE(Answered(json{{"prompt", std::vector<int>(8000, 1234)}, {"max_tokens", 4}}.dump())) << "a larger one";
  EXPECT_EQ(HttpGet(http(), "/healthz").status, 200);
  EXPECT_LT(most_, kLimit);
  clients_.clear();
  const auto resident = [&] { return static_cast<double>(router_->ResidentBytes()) / (1 << 20); };
  std::printf("most %.0f MiB, ", static_cast<double>(most_) / (1 << 20));
  EXPECT_TRUE(Eventually([&] { return router_->ResidentBytes() < most_ / 2 + (64 << 20); })) << resident();
  std::printf("afterwards %.0f MiB\n", resident());
}

}  // namespace
}  // namespace spl::test
