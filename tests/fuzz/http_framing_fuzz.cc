// The router's HTTP server over loopback, from the first byte of a connection: request lines, headers, chunks,
// extensions, trailers, pipelining, cut anywhere. Whatever comes, bodies stay below their limit, the connection ends,
// nothing stays held, and the next client is answered.
//
// The first byte chooses how the rest is cut into pieces, and whether it is sent as it is or as a choice among the
// parts of which requests are made (kParts): random bytes alone do not get past the request line.
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>

#include "services/base/address.h"
#include "services/router/http/http_server.h"
#include "tests/support/uninterrupted.h"

namespace spl::router {
namespace {

constexpr size_t kMaxBody = 8 << 10, kMaxHeader = 2 << 10;
constexpr auto kTimeLimit = std::chrono::seconds(10);

constexpr std::string_view kParts[] = {"GET /x HTTP/1.1\r\n",
                                       "HEAD /x HTTP/1.1\r\n",
                                       "POST /echo HTTP/1.1\r\n",
                                       "POST /echo HTTP/1.0\r\n",
                                       "POST /refused HTTP/1.1\r\n",
                                       "POST /stream HTTP/1.1\r\n",
                                       "HEAD /stream HTTP/1.1\r\n",
                                       "host: t\r\n",
                                       "connection: close\r\n",
                                       "connection: keep-alive\r\n",
                                       "expect: 100-continue\r\n",
                                       "transfer-encoding: chunked\r\n",
                                       "transfer-encoding: gzip, chunked\r\n",
                                       "content-length: 3\r\n",
                                       "content-length: 0\r\n",
                                       "content-length: 9000\r\n",
                                       "content-length: 18446744073709551615\r\n",
                                       "x: ",
                                       "\r\n",
                                       "\r\n\r\n",
                                       "\n",
                                       "abc",
                                       "1\r\na\r\n",
                                       "3;name=value\r\nabc\r\n",
                                       "3;",
                                       "0\r\n",
                                       "0\r\n\r\n",
                                       "0\r\nx-trailer: 1\r\n\r\n",
                                       "000000000000000000003\r\nabc\r\n",
                                       "ffffffffffffffff\r\n",
                                       "fffffffffffffffff\r\n",
                                       "-1\r\n"};

[[noreturn]] void Die(const char* what) {
  std::fprintf(stderr, "http_framing_fuzz: %s\n", what);
  std::abort();
}

void Handle(const std::shared_ptr<HttpExchange>& exchange) {
  const HttpRequest request = exchange->request();
  if (request.body.size() > kMaxBody) Die("a body above its limit was taken");
  if (request.method == "HEAD") Die("HEAD must come as GET");
  const size_t taken = exchange->TakeBody().size();
  if (request.path != "/stream") return exchange->Respond({.body = std::to_string(taken)});
  exchange->StartStream("text/plain", {});
  exchange->Write("piece");
  exchange->EndStream();
}

// One server for the whole run; it is never stopped.
class Target {
 public:
  Target() {
    HttpServerOptions options;
    options.listen = "127.0.0.1:0";
    options.max_header_bytes = kMaxHeader;
    options.max_body_bytes = kMaxBody;
    auto server = HttpServer::Start(
        io_, options, &Handle, [](int, const std::string& message, const std::string&) { return message; },
        [](const HttpRequest& header) -> std::optional<HttpResponse> {
          if (header.path == "/refused") return HttpResponse{.status = 401, .body = "no"};
          return std::nullopt;
        });
    if (!server.ok()) Die("cannot start");
    server_ = std::move(*server);
    std::thread([this] { io_.run(); }).detach();
  }

  // Sends `bytes` in pieces and half-closes; everything that comes back.
  std::string Exchange(std::string_view bytes, size_t piece) const {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(ParseHostPort(server_->address())->port);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (!testing::Connected(fd, to)) Die("cannot connect");
    for (size_t at = 0; at < bytes.size(); at += piece) {
      const std::string_view next = bytes.substr(at, piece);
      if (testing::Uninterrupted([&] { return send(fd, next.data(), next.size(), MSG_NOSIGNAL); }) < 0)
        break;  // closed after an error: right
    }
    shutdown(fd, SHUT_WR);
    std::string reply;
    char buffer[4096];
    const auto deadline = std::chrono::steady_clock::now() + kTimeLimit;
    while (true) {
      pollfd ready{.fd = fd, .events = POLLIN};
      if (poll(&ready, 1, 1000) > 0) {
        const ssize_t n = testing::Uninterrupted([&] { return recv(fd, buffer, sizeof(buffer), 0); });
        if (n <= 0) break;
        reply.append(buffer, static_cast<size_t>(n));
      }
      if (std::chrono::steady_clock::now() > deadline) Die("the connection does not end");
    }
    close(fd);
    return reply;
  }

  void Check() const {
    const std::string reply = Exchange(
        "POST /echo HTTP/1.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        "3\r\nabc\r\n0\r\n\r\n",
        1 << 10);
    if (!reply.ends_with("\r\n\r\n3")) Die("the next client is not answered");
    const auto deadline = std::chrono::steady_clock::now() + kTimeLimit;
    while (server_->buffered_bytes() != 0) {
      if (std::chrono::steady_clock::now() > deadline) Die("bytes stay held");
      std::this_thread::yield();
    }
  }

 private:
  boost::asio::io_context io_;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_{io_.get_executor()};
  std::unique_ptr<HttpServer> server_;
};

}  // namespace
}  // namespace spl::router

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto* const target = new spl::router::Target;
  static uint64_t inputs = 0;
  if (size < 2) return 0;
  const uint8_t choice = data[0];
  std::string bytes;
  if (choice % 4 == 0) {
    bytes.assign(reinterpret_cast<const char*>(data + 1), size - 1);
  } else {
    // A byte is a part; those above the parts stand for themselves, or for many of one character.
    for (size_t i = 1; i < size; ++i) {
      if (data[i] < std::size(spl::router::kParts)) {
        bytes += spl::router::kParts[data[i]];
      } else if (data[i] >= 250) {
        bytes.append(1000, 'a');
      } else {
        bytes += static_cast<char>(data[i]);
      }
    }
  }
  const size_t pieces[] = {1, 7, 100, 1 << 20};
  const size_t piece = pieces[choice / 4 % 4];
  const std::string reply = target->Exchange(bytes, bytes.size() > 4096 ? 1 << 20 : piece);
  if (!reply.empty() && !reply.starts_with("HTTP/1.1 ")) spl::router::Die("the answer is not HTTP");
  if (++inputs % 16 == 0) target->Check();
  return 0;
}
