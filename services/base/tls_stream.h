// One connection that is plain text, or TLS (1.2 or 1.3) from some moment on; Boost.Beast reads and writes either. And
// what both ends of TLS need: the server's context, and whom a client believes.
#pragma once

#include <memory>
#include <string>
#include <utility>
// Before Asio's TLS, which uses std::exchange without it.
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/system/system_error.hpp>

#include "absl/status/statusor.h"
#include "services/base/certificate_files.h"

namespace spl {

using TlsContext = boost::asio::ssl::context;

// Owns its socket (boost::asio::ip::tcp::socket or boost::beast::tcp_stream). One read and one write may be pending at
// a time, all from one strand. Cancelling what is pending on next_layer() loses no bytes while nothing is being
// written.
template <typename Socket>
class TlsStream {
 public:
  using next_layer_type = Socket;
  using executor_type = typename Socket::executor_type;
  using ErrorCode = boost::system::error_code;
  using HandshakeType = boost::asio::ssl::stream_base::handshake_type;

  template <typename... Args>
  explicit TlsStream(Args&&... args) : socket_(std::forward<Args>(args)...) {}
  TlsStream(const TlsStream&) = delete;
  TlsStream& operator=(const TlsStream&) = delete;

  // The socket below: for what is not read or written through TLS.
  Socket& next_layer() { return socket_; }
  executor_type get_executor() { return socket_.get_executor(); }

  // From here on TLS; a handshake comes next. The context may go afterwards.
  void StartTls(TlsContext& context) { tls_ = std::make_unique<Tls>(socket_, context); }
  bool is_tls() const { return tls_ != nullptr; }
  SSL* native_handle() { return tls_->native_handle(); }  // after StartTls

  template <typename Handler>
  void async_handshake(HandshakeType type, Handler&& handler) {
    tls_->async_handshake(type, std::forward<Handler>(handler));
  }
  void handshake(HandshakeType type, ErrorCode& error) { tls_->handshake(type, error); }
  // Says that nothing more will be sent and waits until the peer says so, too. An error when it sends data instead.
  template <typename Handler>
  void async_shutdown(Handler&& handler) {
    tls_->async_shutdown(std::forward<Handler>(handler));
  }

  // The names and forms that Beast and Asio ask of streams.
  template <typename Buffers, typename Handler>
  void async_read_some(const Buffers& buffers, Handler&& handler) {
    if (tls_ != nullptr) return tls_->async_read_some(buffers, std::forward<Handler>(handler));
    socket_.async_read_some(buffers, std::forward<Handler>(handler));
  }
  template <typename Buffers, typename Handler>
  void async_write_some(const Buffers& buffers, Handler&& handler) {
    if (tls_ != nullptr) return tls_->async_write_some(buffers, std::forward<Handler>(handler));
    socket_.async_write_some(buffers, std::forward<Handler>(handler));
  }
  template <typename Buffers>
  size_t read_some(const Buffers& buffers, ErrorCode& error) {
    return tls_ != nullptr ? tls_->read_some(buffers, error) : socket_.read_some(buffers, error);
  }
  template <typename Buffers>
  size_t write_some(const Buffers& buffers, ErrorCode& error) {
    return tls_ != nullptr ? tls_->write_some(buffers, error) : socket_.write_some(buffers, error);
  }
  template <typename Buffers>
  size_t read_some(const Buffers& buffers) {
    return OrThrow([&](ErrorCode& error) { return read_some(buffers, error); });
  }
  template <typename Buffers>
  size_t write_some(const Buffers& buffers) {
    return OrThrow([&](ErrorCode& error) { return write_some(buffers, error); });
  }

 private:
  using Tls = boost::asio::ssl::stream<Socket&>;

  template <typename Call>
  static size_t OrThrow(const Call& call) {
    ErrorCode error;
    const size_t size = call(error);
    if (error) throw boost::system::system_error(error);
    return size;
  }

  Socket socket_;
  std::unique_ptr<Tls> tls_;
};

// A server's context: TLS 1.2 or 1.3, no renegotiation, no certificate asked of clients, and HTTP/1.1 for who
// negotiates a protocol (clients that offer others alone are refused). InvalidArgument, naming the files: OpenSSL does
// not take what they hold, for example because the key is too short.
absl::StatusOr<std::shared_ptr<TlsContext>> MakeHttpsServerContext(const CertificateFiles& files,
                                                                   const Certificate& certificate);

// Whom a client of HTTPS servers believes. Immutable; any thread may call.
class TlsTrust {
 public:
  // Servers whose certificate a CA in `ca_file` has signed; empty: a CA of the system (OpenSSL's own: SSL_CERT_FILE and
  // SSL_CERT_DIR are followed). InvalidArgument, naming `flag` and the file, when it holds no certificate.
  static absl::StatusOr<std::shared_ptr<const TlsTrust>> Load(const std::string& flag, const std::string& ca_file);

  // Starts a client's TLS to `host`, a DNS name or an IP address that the certificate must name. A handshake comes
  // next.
  template <typename Socket>
  void Start(TlsStream<Socket>& stream, const std::string& host) const {
    stream.StartTls(context_);
    Expect(stream.native_handle(), host);
  }
  // Why a handshake failed, in words for whoever gave the URL.
  std::string Explain(SSL* ssl, const std::string& host, const boost::system::error_code& error) const;

 private:
  explicit TlsTrust(std::string flag) : flag_(std::move(flag)) {}
  static void Expect(SSL* ssl, const std::string& host);

  const std::string flag_;
  mutable TlsContext context_{TlsContext::tls_client};  // OpenSSL counts references to it in every connection
};

}  // namespace spl
