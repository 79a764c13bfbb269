// The HTTP client against the router's server, and against one that never answers. TLS: tls_client_test and
// kubernetes_test.
#include "services/base/http_client.h"

#include <gtest/gtest.h>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <thread>

#include "services/base/address.h"
#include "services/router/http/http_server.h"

namespace spl {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr size_t kBig = 4 << 20;

// /echo answers with its body, /big with 4 MiB, anything else with its path.
class HttpClientTest : public ::testing::Test {
 protected:
  void SetUp() override {
    thread_ = std::thread([this] { io_.run(); });
    Start("127.0.0.1:0");
  }
  void Start(const std::string& listen) {
    router::HttpServerOptions options;
    options.listen = listen;
    auto started = router::HttpServer::Start(
        io_, options,
        [](const std::shared_ptr<router::HttpExchange>& exchange) {
          std::string body = exchange->request().path;
          if (body == "/echo") body = exchange->TakeBody();
          if (body == "/big") body = std::string(kBig, 'x');
          exchange->Respond({.body = std::move(body)});
        },
        [](int, const std::string& message, const std::string&) { return message; }, nullptr);
    ASSERT_TRUE(started.ok()) << started.status();
    server_ = std::move(*started);
  }
  ~HttpClientTest() override {
    if (server_ != nullptr) server_->CloseAll();
    work_.reset();
    io_.stop();
    thread_.join();
  }
  // Every connection is gone, and new ones are taken at the same address.
  void Restart() {
    const std::string address = server_->address();
    server_->CloseAll();
    server_ = nullptr;
    Start(address);
  }
  static HttpClientOptions OptionsFor(const std::string& address) {
    const HostPort parsed = *ParseHostPort(address);
    return {.host = parsed.host, .port = std::to_string(parsed.port), .server = "the server", .keep_alive = true};
  }

  boost::asio::io_context io_;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_{io_.get_executor()};
  std::thread thread_;
  std::unique_ptr<router::HttpServer> server_;
};

TEST_F(HttpClientTest, OneConnectionServesManyCallsAndIsMadeAnewWhenItIsGone) {
  HttpClient client(OptionsFor(server_->address()));
  for (int i = 0; i < 5; ++i) {
    const std::string body(static_cast<size_t>(1000 * i), 'b');
    const auto answer = client.Call({.method = "POST", .target = "/echo", .body = body}, kBig);
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_EQ(answer->status, 200);
    EXPECT_EQ(answer->body, body);
    if (i == 2) Restart();
  }
}

TEST_F(HttpClientTest, TheHeadComesBeforeTheBodyAndMayEndTheCall) {
  HttpClient client(OptionsFor(server_->address()));
  std::string length;
  size_t bytes = 0;
  bool go_on = true;
  const auto on_head = [&](const HttpHead& head) {
    EXPECT_EQ(bytes, 0u);
    EXPECT_EQ(head.status, 200);
    EXPECT_EQ(head.Field("no-such-field"), "");
    length = head.Field("CONTENT-length");
    return go_on;
  };
  const auto on_data = [&](int, std::string_view piece) {
    bytes += piece.size();
    return true;
  };
  ASSERT_EQ(client.Exchange({.target = "/big"}, on_head, on_data).value(), 200);
  EXPECT_EQ(length, std::to_string(kBig));
  EXPECT_EQ(bytes, kBig);
  go_on = false;
  bytes = 0;
  ASSERT_EQ(client.Exchange({.target = "/big"}, on_head, on_data).value(), 200);
  EXPECT_EQ(bytes, 0u);
  EXPECT_EQ(client.Call({.target = "/after"}, kBig).value().body, "/after") << "a connection of its own";
}

TEST_F(HttpClientTest, ABodyThatIsTooLongIsNotKept) {
  HttpClient client(OptionsFor(server_->address()));
  EXPECT_EQ(client.Call({.target = "/big"}, kBig - 1).status().code(), absl::StatusCode::kResourceExhausted);
  const auto whole = client.Call({.target = "/big"}, kBig);
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(whole->body.size(), kBig);
  size_t pieces = 0;
  const auto status = client.Exchange({.target = "/big"}, [&](int, std::string_view) { return ++pieces < 3; });
  EXPECT_TRUE(status.ok()) << status.status();
  EXPECT_EQ(pieces, 3u);
  EXPECT_EQ(client.Call({.target = "/after"}, 100)->body, "/after");
}

TEST(SilentServerTest, CallsEndAtTheirDeadlineAndWhenTheyAreCancelled) {
  boost::asio::io_context io;
  boost::asio::ip::tcp::acceptor acceptor(io, {boost::asio::ip::address_v4::loopback(), 0});
  HttpClientOptions options{
      .host = "127.0.0.1", .port = std::to_string(acceptor.local_endpoint().port()), .server = "the server"};
  options.timeout = 50ms;
  const auto start = Clock::now();
  HttpClient late(options);
  EXPECT_EQ(late.Call({.target = "/"}, 100).status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(Clock::now() - start, 20s);
  options.timeout = 0ms;
  HttpClient client(options);
  absl::Status ended;
  std::thread caller([&] { ended = client.Call({.target = "/"}, 100).status(); });
  client.Cancel();
  caller.join();
  EXPECT_EQ(ended.code(), absl::StatusCode::kCancelled) << ended;
  EXPECT_EQ(client.Call({.target = "/"}, 100).status().code(), absl::StatusCode::kCancelled);
  EXPECT_FALSE(client.Pause(10s));
}

TEST(SilentServerTest, NobodyThereIsUnavailable) {
  HttpClient client({.host = "127.0.0.1", .port = "1", .server = "the server at port 1"});
  const absl::Status status = client.Call({.target = "/"}, 100).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("cannot connect to the server at port 1"), std::string::npos) << status;
}

}  // namespace
}  // namespace spl
