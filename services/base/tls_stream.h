// A connection that is plain text, or TLS (1.2 or 1.3) from some moment on; Boost.Beast reads and writes either. Also
// both ends of TLS: the server's context, and the CAs that a client trusts.
#pragma once

#include <memory>
#include <string>
#include <utility>
// Included before Asio's TLS, which uses std::exchange without including it.
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/system/system_error.hpp>

#include "absl/status/statusor.h"
#include "services/base/certificate_files.h"

namespace spl {

using TlsContext = boost::asio::ssl::context;

// Owns its socket (boost::asio::ip::tcp::socket or boost::beast::tcp_stream). One read and one write may be pending at
// a time, all from one strand. Cancelling pending operations on next_layer() loses no bytes unless a write is running.
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

  // The socket below, for operations that do not read or write through TLS.
  Socket& next_layer() { return socket_; }
  executor_type get_executor() { return socket_.get_executor(); }

  // Switches to TLS; a handshake must come next. The context may be destroyed afterwards.
  void StartTls(TlsContext& context) { tls_ = std::make_unique<Tls>(socket_, context); }
  bool is_tls() const { return tls_ != nullptr; }
  SSL* native_handle() { return tls_->native_handle(); }  // after StartTls

  template <typename Handler>
  void async_handshake(HandshakeType type, Handler&& handler) {
    tls_->async_handshake(type, std::forward<Handler>(handler));
  }
  void handshake(HandshakeType type, ErrorCode& error) { tls_->handshake(type, error); }
  // Announces the end of sending and waits until the peer does the same. Error: the peer sends data instead.
  template <typename Handler>
  void async_shutdown(Handler&& handler) {
    tls_->async_shutdown(std::forward<Handler>(handler));
  }

  // Names and signatures that Beast and Asio require of streams.
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

// Makes a server's context: TLS 1.2 or 1.3, no renegotiation, no client certificates, and HTTP/1.1 for clients that
// negotiate a protocol (clients that offer only others are refused). InvalidArgument names the files: OpenSSL refuses
// their contents, for example because the key is too short.
absl::StatusOr<std::shared_ptr<TlsContext>> MakeHttpsServerContext(const CertificateFiles& files,
                                                                   const Certificate& certificate);

// The CAs that a client of HTTPS servers trusts. Immutable; any thread may call.
class TlsTrust {
 public:
  // Trusts servers whose certificate a CA in `ca_file` has signed; empty: a CA of the system (OpenSSL's own;
  // SSL_CERT_FILE and SSL_CERT_DIR apply). InvalidArgument names `flag` and the file: it holds no certificate.
  static absl::StatusOr<std::shared_ptr<const TlsTrust>> Load(const std::string& flag, const std::string& ca_file);

  // Starts a client's TLS to `host`, a DNS name or an IP address that the certificate must name. A handshake must come
  // next.
  template <typename Socket>
  void Start(TlsStream<Socket>& stream, const std::string& host) const {
    stream.StartTls(context_);
    Expect(stream.native_handle(), host);
  }
  // Explains why a handshake failed, in words for the person who gave the URL.
  std::string Explain(SSL* ssl, const std::string& host, const boost::system::error_code& error) const;

 private:
  explicit TlsTrust(std::string flag) : flag_(std::move(flag)) {}
  static void Expect(SSL* ssl, const std::string& host);

  const std::string flag_;
  mutable TlsContext context_{TlsContext::tls_client};  // shared by all connections: OpenSSL counts references
};

}  // namespace spl
