// What the HTTP server holds in memory and how long, whatever clients send or do not read. Raw sockets, no router.
#include "services/router/http/http_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <fstream>
#include <thread>

#include "tests/support/eventually.h"
#include "tests/support/http_test_client.h"

namespace spl::router {
namespace {

using test::Eventually;
using ::testing::HasSubstr;
using testing::HttpTestClient;
using testing::TestResponse;

constexpr size_t kMiB = 1 << 20;
constexpr char kChunked[] = "POST /echo HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n";

size_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  size_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * 4096;
}

// /echo answers with the length of its body, /big with 4 MiB, /never not at all, anything else with its path.
class HttpServerTest : public ::testing::Test {
 protected:
  ~HttpServerTest() override {
    if (server_ != nullptr) server_->CloseAll();
    work_.reset();
    io_.stop();
    for (std::thread& thread : threads_) thread.join();
  }
  void Start(HttpGate gate = nullptr) {
    options_.listen = "127.0.0.1:0";
    for (int i = 0; i < 2; ++i) threads_.emplace_back([this] { io_.run(); });
    const auto handler = [this](const std::shared_ptr<HttpExchange>& exchange) {
      const HttpRequest& request = exchange->request();
      bodies_read_ += request.body.size();
      std::string body = request.path;
      if (request.path == "/echo") body = std::to_string(exchange->TakeBody().size());
      if (request.path == "/big") body = std::string(4 * kMiB, 'x');
      if (request.path == "/never") return Keep(exchange);
      exchange->Respond({.body = std::move(body)});
    };
    auto started = HttpServer::Start(
        io_, options_, handler, [](int, const std::string& message, const std::string&) { return message; },
        std::move(gate));
    ASSERT_TRUE(started.ok()) << started.status();
    server_ = std::move(*started);
  }
  void Keep(const std::shared_ptr<HttpExchange>& exchange) {
    exchange->SetDisconnectCallback([this] { ++disconnected_; });
    std::lock_guard lock(mutex_);
    kept_.push_back(exchange);
    ++num_kept_;
  }
  // Sends `head`, then 64 MiB of `filler`; how much memory that took.
  size_t Flood(const std::string& head, const std::string& filler) {
    HttpTestClient client(server_->address());
    client.Send(head);
    std::string piece;
    while (piece.size() < kMiB) piece += filler;
    const size_t before = ResidentBytes();
    size_t most = before;
    for (size_t sent = 0; sent < 64 * kMiB && client.why().empty(); sent += piece.size()) {
      client.Send(piece);
      most = std::max(most, ResidentBytes());
    }
    answer_ = client.Read();
    EXPECT_TRUE(answer_.status == 431 || answer_.status == 400 || answer_.status == 0) << answer_.status;
    return most - before;
  }
  void ExpectServes() {
    const TestResponse answer = testing::Call(server_->address(), "POST", "/echo", std::string(100'000, 'a'));
    EXPECT_EQ(answer.status, 200);
    EXPECT_EQ(answer.body, "100000");
  }

  HttpServerOptions options_;
  boost::asio::io_context io_;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_{io_.get_executor()};
  std::vector<std::thread> threads_;
  std::unique_ptr<HttpServer> server_;
  std::atomic<size_t> bodies_read_{0};
  std::atomic<size_t> num_kept_{0}, disconnected_{0};
  std::mutex mutex_;
  std::vector<std::shared_ptr<HttpExchange>> kept_;  // by mutex_
  TestResponse answer_;
};

// S1: what the parser wants in one piece had no bound, and --max-body-bytes counts none of it.
TEST_F(HttpServerTest, FramingOf64MiBTakesNoMemory) {
  Start();
  ExpectServes();
  EXPECT_LT(Flood(std::string(kChunked) + "2;", "a"), 4 * kMiB) << "a chunk's extension";
  EXPECT_LT(Flood(kChunked, "0"), 4 * kMiB) << "digits of a chunk's size";
  EXPECT_LT(Flood(std::string(kChunked) + "0\r\n", "x-trailer: aaaaaaaaaaaaaaaa\r\n"), 4 * kMiB) << "trailers";
  EXPECT_LT(Flood(std::string(kChunked) + "0\r\nx-trailer: ", "a"), 4 * kMiB) << "one trailer";
  EXPECT_LT(Flood("POST /echo HTTP/1.1\r\nx: ", "a"), 4 * kMiB) << "a header";
  EXPECT_LT(Flood(kChunked, "1;ext=" + std::string(100, 'e') + "\r\na\r\n"), 4 * kMiB) << "many extensions";
  EXPECT_THAT(answer_.body, HasSubstr("chunk headers mostly"));
  ExpectServes();
}

TEST_F(HttpServerTest, SmallChunksAndATrailerAreTaken) {
  Start();
  HttpTestClient client(server_->address());
  std::string body;
  for (int i = 0; i < 20'000; ++i) body += "1\r\na\r\n";
  client.Send(kChunked + body + "0\r\nx-checksum: 1\r\n\r\n");
  const TestResponse answer = client.Read();
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(answer.body, "20000");
}

// S15: bytes of a body behind HEAD would be taken for the next answer.
TEST_F(HttpServerTest, HeadIsGetWithoutABody) {
  Start();
  HttpTestClient client(server_->address());
  client.Send("HEAD /some/path HTTP/1.1\r\nhost: t\r\n\r\n");
  const TestResponse head = client.ReadHead();
  EXPECT_EQ(head.status, 200);
  EXPECT_EQ(head.headers.at("content-length"), "10") << "what GET would send";
  const TestResponse next = client.Call("GET", "/next");
  EXPECT_EQ(next.status, 200);
  EXPECT_EQ(next.body, "/next");
}

TEST_F(HttpServerTest, OtherTransferCodingsAre501) {
  Start();
  for (const char* coding : {"gzip, chunked", "gzip", "identity", "chunked, chunked"}) {
    HttpTestClient client(server_->address());
    client.Send(std::string("POST /echo HTTP/1.1\r\nhost: t\r\ntransfer-encoding: ") + coding +
                "\r\n\r\n1\r\na\r\n0\r\n\r\n");
    const int status = client.Read().status;
    EXPECT_TRUE(status == 501 || status == 400) << coding << ": " << status;
    EXPECT_TRUE(status == 501 || std::string(coding) != "gzip, chunked");
  }
  HttpTestClient client(server_->address());
  client.Send("POST /echo HTTP/1.1\r\nhost: t\r\ntransfer-encoding: Chunked\r\n\r\n1\r\na\r\n0\r\n\r\n");
  EXPECT_EQ(client.Read().body, "1");
}

// S4: what the gate refuses is answered on its header; the body is never waited for.
TEST_F(HttpServerTest, TheGateAnswersBeforeTheBodyComes) {
  Start([](const HttpRequest& header) -> std::optional<HttpResponse> {
    EXPECT_TRUE(header.body.empty());
    if (header.authorization == "Bearer good") return std::nullopt;
    return HttpResponse{.status = 401, .body = "no"};
  });
  HttpTestClient client(server_->address());
  client.Send("POST /echo HTTP/1.1\r\nhost: t\r\ncontent-length: 8000000\r\n\r\n");
  const TestResponse refused = client.Read();
  EXPECT_EQ(refused.status, 401);
  EXPECT_EQ(refused.headers.at("connection"), "close");
  EXPECT_EQ(bodies_read_, 0u);
  HttpTestClient expecting(server_->address());
  expecting.Send("POST /echo HTTP/1.1\r\nhost: t\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n");
  EXPECT_EQ(expecting.Read().status, 401) << "not 100";
  // Without a body the connection goes on.
  HttpTestClient bare(server_->address());
  EXPECT_EQ(bare.Call("GET", "/x").status, 401);
  EXPECT_EQ(bare.Call("GET", "/x", "", {"authorization: Bearer good"}).status, 200);
}

std::string HalfBody(size_t sent) {
  return "POST /echo HTTP/1.1\r\nhost: t\r\ncontent-length: 8000000\r\n\r\n" + std::string(sent, 'a');
}

// S4: half-sent bodies make room for one that comes at once.
TEST_F(HttpServerTest, TheOldestHalfSentBodyMakesRoom) {
  options_.max_buffered_bytes = kMiB;
  options_.eviction_age = std::chrono::milliseconds(0);
  Start();
  std::vector<std::unique_ptr<HttpTestClient>> half;
  for (int i = 0; i < 20; ++i) {
    half.push_back(std::make_unique<HttpTestClient>(server_->address()));
    half.back()->Send(HalfBody(400'000));
  }
  EXPECT_TRUE(Eventually([&] { return server_->buffered_bytes() > kMiB / 2; }));
  EXPECT_LE(server_->buffered_bytes(), kMiB);
  const TestResponse normal = testing::Call(server_->address(), "POST", "/echo", std::string(300'000, 'a'));
  EXPECT_EQ(normal.status, 200);
  EXPECT_EQ(normal.body, "300000");
  const TestResponse evicted = half.front()->Read();
  EXPECT_EQ(evicted.status, 503);
  EXPECT_EQ(evicted.headers.at("retry-after"), "1");
  half.clear();
  EXPECT_TRUE(Eventually([&] { return server_->buffered_bytes() == 0; })) << "given back";
}

TEST_F(HttpServerTest, ANewcomerIsRefusedWhenAllBodiesAreYoung) {
  options_.max_buffered_bytes = kMiB;
  options_.eviction_age = std::chrono::hours(1);
  Start();
  HttpTestClient half(server_->address());
  half.Send(HalfBody(900'000));
  EXPECT_TRUE(Eventually([&] { return server_->buffered_bytes() > 850'000; }));
  EXPECT_EQ(testing::Call(server_->address(), "POST", "/echo", std::string(300'000, 'a')).status, 503);
  EXPECT_EQ(testing::Call(server_->address(), "POST", "/echo", std::string(16'000, 'a')).status, 200)
      << "small ones pass";
}

// S4: an answer that nobody reads holds its memory no longer than somebody else needs it.
TEST_F(HttpServerTest, UnreadAnswersAreBounded) {
  options_.max_buffered_bytes = 10 * kMiB;
  options_.eviction_age = std::chrono::milliseconds(0);
  Start();
  std::vector<std::unique_ptr<HttpTestClient>> silent;
  for (int i = 0; i < 12; ++i) {
    silent.push_back(std::make_unique<HttpTestClient>(server_->address()));
    silent.back()->SendRequest("GET", "/big", "");
  }
  EXPECT_TRUE(Eventually([&] { return server_->buffered_bytes() > 7 * kMiB; }));
  const TestResponse read = testing::Call(server_->address(), "GET", "/big");
  EXPECT_EQ(read.status, 200);
  EXPECT_EQ(read.body.size(), 4 * kMiB);
  EXPECT_LE(server_->buffered_bytes(), 10 * kMiB);
  silent.clear();
  EXPECT_TRUE(Eventually([&] { return server_->buffered_bytes() == 0; }));
}

TEST_F(HttpServerTest, AnAnswerWithoutRoomIs503) {
  options_.max_buffered_bytes = 3 * kMiB;
  Start();
  EXPECT_EQ(testing::Call(server_->address(), "GET", "/big").status, 503);
  ExpectServes();
}

// S4: connections that send nothing, or half a request, do not keep others out.
TEST_F(HttpServerTest, ANewConnectionTakesTheOldestOnesPlace) {
  options_.max_connections = 8;
  options_.eviction_age = std::chrono::milliseconds(0);
  Start();
  std::vector<std::unique_ptr<HttpTestClient>> others;
  for (int i = 0; i < 40; ++i) {
    others.push_back(std::make_unique<HttpTestClient>(server_->address()));
    if (i % 2 == 0) others.back()->Send(HalfBody(1'000));
  }
  EXPECT_TRUE(Eventually([&] { return testing::Call(server_->address(), "GET", "/x").status == 200; }));
}

// A connection owns itself through an exchange that nobody answers: it leaked where the io_context stopped at once.
TEST_F(HttpServerTest, CloseAllReturnsWhenEveryConnectionIsGone) {
  Start();
  std::vector<std::unique_ptr<HttpTestClient>> clients;
  for (size_t i = 0; i < 40; ++i) {
    clients.push_back(std::make_unique<HttpTestClient>(server_->address()));
    clients.back()->Send("GET /never HTTP/1.1\r\nhost: t\r\n\r\n");
  }
  EXPECT_TRUE(Eventually([&] { return num_kept_ == clients.size(); }));
  server_->CloseAll();
  EXPECT_EQ(disconnected_, clients.size());
}

}  // namespace
}  // namespace spl::router
