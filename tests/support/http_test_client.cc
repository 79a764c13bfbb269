#include "tests/support/http_test_client.h"

#include <arpa/inet.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

namespace spl::testing {

HttpTestClient::HttpTestClient(const std::string& address) : address_(address) {
  const size_t colon = address.rfind(':');
  sockaddr_in target{};
  target.sin_family = AF_INET;
  target.sin_port = htons(static_cast<uint16_t>(std::atoi(address.c_str() + colon + 1)));
  inet_pton(AF_INET, address.substr(0, colon).c_str(), &target.sin_addr);
  fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const timeval timeout{.tv_sec = 20, .tv_usec = 0};
  setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
  if (connect(fd_, reinterpret_cast<const sockaddr*>(&target), sizeof(target)) != 0) {
    Fail("connect");
    Close();
    return;
  }
  sockaddr_in own{};
  socklen_t size = sizeof(own);
  if (getsockname(fd_, reinterpret_cast<sockaddr*>(&own), &size) == 0) local_port_ = ntohs(own.sin_port);
}

HttpTestClient::HttpTestClient(const std::string& address, const TestTls& tls) : HttpTestClient(address) {
  if (connected()) StartTls(tls);
}

void HttpTestClient::StartTls(const TestTls& tls) {
  std::signal(SIGPIPE, SIG_IGN);  // OpenSSL writes to sockets that were closed as if they were pipes
  SSL_CTX* const context = SSL_CTX_new(TLS_client_method());
  BIO* const bio = BIO_new_mem_buf(tls.ca_pem.data(), static_cast<int>(tls.ca_pem.size()));
  X509* const ca = PEM_read_bio_X509(bio, nullptr, nullptr, nullptr);
  X509_STORE_add_cert(SSL_CTX_get_cert_store(context), ca);
  X509_free(ca);
  BIO_free(bio);
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);
  if (tls.max_version != 0) {
    SSL_CTX_set_security_level(context, 0);  // old versions may be offered at all
    SSL_CTX_set_min_proto_version(context, TLS1_VERSION);
    SSL_CTX_set_max_proto_version(context, tls.max_version);
  }
  ssl_.reset(SSL_new(context));
  SSL_CTX_free(context);
  if (!tls.alpn.empty()) {
    const std::string list = static_cast<char>(tls.alpn.size()) + tls.alpn;
    SSL_set_alpn_protos(ssl_.get(), reinterpret_cast<const unsigned char*>(list.data()),
                        static_cast<unsigned>(list.size()));
  }
  X509_VERIFY_PARAM* const expected = SSL_get0_param(ssl_.get());
  if (X509_VERIFY_PARAM_set1_ip_asc(expected, tls.host.c_str()) != 1) {
    X509_VERIFY_PARAM_set1_host(expected, tls.host.c_str(), tls.host.size());
    SSL_set_tlsext_host_name(ssl_.get(), tls.host.c_str());
  }
  SSL_set_fd(ssl_.get(), fd_);
  ERR_clear_error();
  if (SSL_connect(ssl_.get()) == 1) return;
  FailTls("handshake");
  Close();
}

void HttpTestClient::FailTls(const char* what) {
  const char* const reason = ERR_reason_error_string(ERR_peek_error());
  if (why_.empty()) why_ = std::string(what) + ": " + (reason == nullptr ? std::strerror(errno) : reason);
  ERR_clear_error();
}

bool HttpTestClient::ended_by_notice() const {
  return ssl_ != nullptr && (SSL_get_shutdown(ssl_.get()) & SSL_RECEIVED_SHUTDOWN) != 0;
}

void HttpTestClient::Fail(const char* what) {
  if (why_.empty()) why_ = std::string(what) + ": " + std::strerror(errno);
}

void HttpTestClient::Send(const std::string& bytes) {
  if (ssl_ != nullptr) {
    ERR_clear_error();
    if (SSL_write(ssl_.get(), bytes.data(), static_cast<int>(bytes.size())) <= 0) FailTls("send");
    return;
  }
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t n = send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    // Calls with a time-out are not restarted when the process was stopped and goes on.
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return Fail("send");
    sent += static_cast<size_t>(n);
  }
}

void HttpTestClient::SendRequest(const std::string& method, const std::string& path, const std::string& body,
                                 const std::vector<std::string>& headers) {
  const auto given = [&](const std::string& name) {
    return std::any_of(headers.begin(), headers.end(), [&](const std::string& h) { return h.starts_with(name + ":"); });
  };
  std::string text = method + " " + path + " HTTP/1.1\r\n";
  if (!given("host")) text += "host: " + address_ + "\r\n";
  if (!given("content-type") && !body.empty()) text += "content-type: application/json\r\n";
  for (const std::string& header : headers) text += header + "\r\n";
  if (!body.empty() || method == "POST") text += "content-length: " + std::to_string(body.size()) + "\r\n";
  Send(text + "\r\n" + body);
}

bool HttpTestClient::Fill() {
  char bytes[16384];
  if (fd_ < 0) return false;
  if (ssl_ != nullptr) {
    ERR_clear_error();
    const int size = SSL_read(ssl_.get(), bytes, sizeof(bytes));
    if (size <= 0 && ended_by_notice() && why_.empty()) why_ = "the server has closed";
    if (size <= 0) FailTls("recv");
    if (size <= 0) return false;
    buffer_.append(bytes, static_cast<size_t>(size));
    return true;
  }
  ssize_t n;
  do n = recv(fd_, bytes, sizeof(bytes), 0);
  while (n < 0 && errno == EINTR);
  if (n == 0 && why_.empty()) why_ = "the server has closed";
  if (n < 0) Fail("recv");
  if (n <= 0) return false;
  buffer_.append(bytes, static_cast<size_t>(n));
  return true;
}

std::optional<std::string> HttpTestClient::ReadLine() {
  size_t end;
  while ((end = buffer_.find("\r\n")) == std::string::npos) {
    if (!Fill()) return std::nullopt;
  }
  std::string line = buffer_.substr(0, end);
  buffer_.erase(0, end + 2);
  return line;
}

TestResponse HttpTestClient::ReadHead() {
  TestResponse response;
  const std::optional<std::string> status = ReadLine();
  if (!status.has_value() || status->size() < 12) return response;
  while (true) {
    const std::optional<std::string> line = ReadLine();
    if (!line.has_value()) return response;
    if (line->empty()) break;
    const size_t colon = line->find(':');
    std::string name = line->substr(0, colon);
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
    response.headers[name] = line->substr(std::min(line->size(), colon + 2));
  }
  response.status = std::atoi(status->c_str() + 9);
  return response;
}

std::optional<std::string> HttpTestClient::ReadChunk() {
  const std::optional<std::string> size_line = ReadLine();
  if (!size_line.has_value()) return std::nullopt;
  const size_t size = std::strtoul(size_line->c_str(), nullptr, 16);
  while (buffer_.size() < size + 2) {
    if (!Fill()) return std::nullopt;
  }
  std::string chunk = buffer_.substr(0, size);
  buffer_.erase(0, size + 2);
  return chunk;
}

TestResponse HttpTestClient::Read() { return ReadBody(ReadHead()); }

TestResponse HttpTestClient::ReadBody(TestResponse response) {
  if (response.status == 0) return response;
  if (response.headers.count("transfer-encoding") > 0) {
    while (true) {
      const std::optional<std::string> chunk = ReadChunk();
      if (!chunk.has_value()) response.status = 0;
      if (!chunk.has_value() || chunk->empty()) break;
      response.body += *chunk;
    }
    return response;
  }
  if (response.status == 304) return response;  // its length is that of the body that it stands for
  const size_t size = std::strtoul(response.headers["content-length"].c_str(), nullptr, 10);
  while (buffer_.size() < size) {
    if (!Fill()) return {};
  }
  response.body = buffer_.substr(0, size);
  buffer_.erase(0, size);
  return response;
}

TestResponse HttpTestClient::Call(const std::string& method, const std::string& path, const std::string& body,
                                  const std::vector<std::string>& headers) {
  SendRequest(method, path, body, headers);
  return Read();
}

std::optional<std::string> HttpTestClient::NextEvent() {
  size_t end;
  while ((end = events_.find("\n\n")) == std::string::npos) {
    const std::optional<std::string> chunk = ReadChunk();
    if (!chunk.has_value() || chunk->empty()) return std::nullopt;
    events_ += *chunk;
  }
  const std::string event = events_.substr(0, end);
  events_.erase(0, end + 2);
  return event.rfind("data: ", 0) == 0 ? event.substr(6) : event;
}

bool HttpTestClient::AtEnd() {
  while (Fill()) {
  }
  return fd_ >= 0;
}

void HttpTestClient::Close() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

void HttpTestClient::Abort() {
  const linger reset{.l_onoff = 1, .l_linger = 0};
  setsockopt(fd_, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
  Close();
}

TestResponse Call(const std::string& address, const TestTls& tls, const std::string& method, const std::string& path,
                  const std::string& body, const std::vector<std::string>& headers) {
  HttpTestClient client(address, tls);
  return client.connected() ? client.Call(method, path, body, headers) : TestResponse();
}

TestResponse Call(const std::string& address, const std::string& method, const std::string& path,
                  const std::string& body, const std::vector<std::string>& headers) {
  HttpTestClient client(address);
  return client.Call(method, path, body, headers);
}

}  // namespace spl::testing
