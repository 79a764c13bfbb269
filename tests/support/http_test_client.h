// A blocking HTTP client for tests: one connection, plain sockets or TLS on them, every wait bounded.
#pragma once

#include <openssl/ssl.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace spl::testing {

struct TestResponse {
  int status = 0;                              // 0: the connection ended or timed out first
  std::map<std::string, std::string> headers;  // lower-case names
  std::string body;
};

// What the client believes and offers. Trusts the certificates of `ca_pem` alone.
struct TestTls {
  std::string ca_pem;
  std::string host = "127.0.0.1";  // that the certificate must name: a name, or a numeric address
  int max_version = 0;             // TLS1_1_VERSION, …; 0: the newest
  std::string alpn = "http/1.1";   // offered; empty: nothing
};

// One thread. Reads give up after 20 s. The socket is not inherited by programs that the test starts meanwhile.
class HttpTestClient {
 public:
  explicit HttpTestClient(const std::string& address);  // HOST:PORT, numeric
  // https. A handshake that fails leaves it not connected, and `why` says why.
  HttpTestClient(const std::string& address, const TestTls& tls);
  ~HttpTestClient() { Close(); }
  HttpTestClient(const HttpTestClient&) = delete;
  HttpTestClient& operator=(const HttpTestClient&) = delete;

  bool connected() const { return fd_ >= 0; }
  // Why nothing more can be read or sent: "" while nothing has failed.
  const std::string& why() const { return why_; }
  int local_port() const { return local_port_; }
  void Send(const std::string& bytes);
  // With the address as host and JSON as content type, unless `headers` ("name: value", lower case) has others.
  void SendRequest(const std::string& method, const std::string& path, const std::string& body,
                   const std::vector<std::string>& headers = {});
  // A whole response, chunked or not.
  TestResponse Read();
  TestResponse Call(const std::string& method, const std::string& path, const std::string& body = "",
                    const std::vector<std::string>& headers = {});

  // For streams: the head first, then the data of one server-sent event per call; nothing at the end of the stream.
  TestResponse ReadHead();
  TestResponse ReadBody(TestResponse head);  // of an answer that turned out to be no stream
  std::optional<std::string> NextEvent();

  bool AtEnd();  // the server has closed; reads what is left
  // With TLS: the server has said that this is the end.
  bool ended_by_notice() const;
  void Close();
  // Closes with a reset, as a killed client does.
  void Abort();

 private:
  bool Fill();
  std::optional<std::string> ReadLine();
  std::optional<std::string> ReadChunk();

  void Fail(const char* what);
  void StartTls(const TestTls& tls);
  void FailTls(const char* what);

  struct FreeSsl {
    void operator()(SSL* ssl) const { SSL_free(ssl); }
  };

  const std::string address_;
  int fd_ = -1;
  std::unique_ptr<SSL, FreeSsl> ssl_;
  int local_port_ = 0;
  std::string why_;
  std::string buffer_;  // read, not yet parsed
  std::string events_;  // unchunked stream text, not yet taken
};

TestResponse Call(const std::string& address, const std::string& method, const std::string& path,
                  const std::string& body = "", const std::vector<std::string>& headers = {});
TestResponse Call(const std::string& address, const TestTls& tls, const std::string& method, const std::string& path,
                  const std::string& body = "", const std::vector<std::string>& headers = {});

}  // namespace spl::testing
