#include "services/base/tls_stream.h"

#include <arpa/inet.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include <boost/asio/buffer.hpp>

#include "services/base/status.h"

namespace spl {
namespace {

constexpr unsigned char kHttp11[] = {8, 'h', 't', 't', 'p', '/', '1', '.', '1'};  // a list with one entry

int ChooseHttp11(SSL*, const unsigned char** chosen, unsigned char* size, const unsigned char* offered,
                 unsigned int offered_size, void*) {
  unsigned char* found = nullptr;
  if (SSL_select_next_proto(&found, size, kHttp11, sizeof(kHttp11), offered, offered_size) != OPENSSL_NPN_NEGOTIATED)
    return SSL_TLSEXT_ERR_ALERT_FATAL;
  *chosen = found;
  return SSL_TLSEXT_ERR_OK;
}

bool IsAddress(const std::string& host) {
  in6_addr address;
  return inet_pton(AF_INET, host.c_str(), &address) == 1 || inet_pton(AF_INET6, host.c_str(), &address) == 1;
}

}  // namespace

absl::StatusOr<std::shared_ptr<TlsContext>> MakeHttpsServerContext(const CertificateFiles& files,
                                                                   const Certificate& certificate) {
  auto context = std::make_shared<TlsContext>(TlsContext::tls_server);
  boost::system::error_code error;
  context->use_certificate_chain(boost::asio::buffer(certificate.chain_pem), error);
  if (error) return InvalidArgument("{} {}: {}", files.cert_flag, files.cert_file, error.message());
  context->use_private_key(boost::asio::buffer(certificate.key_pem), TlsContext::pem, error);
  if (error) return InvalidArgument("{} {}: {}", files.key_flag, files.key_file, error.message());
  SSL_CTX* const raw = context->native_handle();
  SSL_CTX_set_min_proto_version(raw, TLS1_2_VERSION);
  SSL_CTX_set_options(raw, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION);
  // Sessions are resumed by tickets, which clients keep; a cache here would only grow.
  SSL_CTX_set_session_cache_mode(raw, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_mode(raw, SSL_MODE_RELEASE_BUFFERS);  // idle connections hold no buffers of OpenSSL
  SSL_CTX_set_alpn_select_cb(raw, ChooseHttp11, nullptr);
  return context;
}

absl::StatusOr<std::shared_ptr<const TlsTrust>> TlsTrust::Load(const std::string& flag, const std::string& ca_file) {
  std::shared_ptr<TlsTrust> trust(new TlsTrust(flag));
  TlsContext& context = trust->context_;
  SSL_CTX_set_min_proto_version(context.native_handle(), TLS1_2_VERSION);
  context.set_verify_mode(boost::asio::ssl::verify_peer);
  boost::system::error_code error;
  if (ca_file.empty()) {
    context.set_default_verify_paths(error);
    if (error) return InvalidArgument("the system's CAs cannot be used: {}; give {} FILE", error.message(), flag);
    return trust;
  }
  SPLICE_ASSIGN_OR_RETURN(const std::string pem, ReadCaFile(flag, ca_file));
  context.add_certificate_authority(boost::asio::buffer(pem), error);
  if (error) return InvalidArgument("{} {}: {}", flag, ca_file, error.message());
  return trust;
}

void TlsTrust::Expect(SSL* ssl, const std::string& host) {
  SSL_set_alpn_protos(ssl, kHttp11, sizeof(kHttp11));
  X509_VERIFY_PARAM* const expected = SSL_get0_param(ssl);
  // Subject names have long been ignored; certificates are made for their alternative names.
  X509_VERIFY_PARAM_set_hostflags(expected, X509_CHECK_FLAG_NEVER_CHECK_SUBJECT | X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
  if (IsAddress(host)) {
    X509_VERIFY_PARAM_set1_ip_asc(expected, host.c_str());
    return;
  }
  SSL_set_tlsext_host_name(ssl, host.c_str());  // only names may be announced
  X509_VERIFY_PARAM_set1_host(expected, host.c_str(), host.size());
}

std::string TlsTrust::Explain(SSL* ssl, const std::string& host, const boost::system::error_code& error) const {
  const long result = SSL_get_verify_result(ssl);
  if (result == X509_V_ERR_HOSTNAME_MISMATCH || result == X509_V_ERR_IP_ADDRESS_MISMATCH)
    return fmt::format("the server's certificate does not name '{}'", host);
  if (result == X509_V_ERR_CERT_HAS_EXPIRED || result == X509_V_ERR_CERT_NOT_YET_VALID)
    return fmt::format("the server's certificate is not valid now: {}", X509_verify_cert_error_string(result));
  if (result != X509_V_OK)
    return fmt::format("the server's certificate is not believed: {}; {} FILE names the CA that has signed it",
                       X509_verify_cert_error_string(result), flag_);
  const bool is_tls_error = error.category() == boost::asio::error::get_ssl_category();
  const int reason = is_tls_error ? ERR_GET_REASON(static_cast<unsigned long>(error.value())) : 0;
  if (reason == SSL_R_WRONG_VERSION_NUMBER || reason == SSL_R_PACKET_LENGTH_TOO_LONG)
    return "the server answered in plain text: does it serve http:// instead of https://?";
  return "TLS handshake failed: " + error.message();
}

}  // namespace spl
