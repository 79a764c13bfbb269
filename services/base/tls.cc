#include "services/base/tls.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <CLI/App.hpp>
#include <utility>

#include "services/base/log.h"
#include "services/base/status.h"

namespace spl {
namespace {

template <auto Free>
struct FreeWith {
  template <typename T>
  void operator()(T* object) const {
    Free(object);
  }
};
using Bio = std::unique_ptr<BIO, FreeWith<BIO_free_all>>;
using Certificate = std::unique_ptr<X509, FreeWith<X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, FreeWith<EVP_PKEY_free>>;

// OpenSSL's queue of errors is the thread's: what is not taken out would be told as the reason of something else.
std::string LastOpenSslError() {
  const char* const reason = ERR_reason_error_string(ERR_peek_last_error());
  const std::string text = reason == nullptr ? "unknown reason" : reason;
  ERR_clear_error();
  return text;
}

absl::StatusOr<Bio> OpenFile(const char* flag, const std::string& file) {
  Bio bio(BIO_new_file(file.c_str(), "r"));
  if (bio == nullptr) return InvalidArgument("{} {} cannot be read: {}", flag, file, LastOpenSslError());
  return bio;
}

absl::StatusOr<Certificate> ReadCertificate(const char* flag, const std::string& file) {
  SPLICE_ASSIGN_OR_RETURN(const Bio bio, OpenFile(flag, file));
  Certificate certificate(PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr));
  if (certificate == nullptr)
    return InvalidArgument("{} {} holds no certificate in PEM: {}", flag, file, LastOpenSslError());
  return certificate;
}

absl::StatusOr<Key> ReadKey(const std::string& file) {
  SPLICE_ASSIGN_OR_RETURN(const Bio bio, OpenFile("--tls-key", file));
  // With an empty passphrase a protected key is an error, instead of a question on the terminal.
  char no_passphrase[] = "";
  Key key(PEM_read_bio_PrivateKey(bio.get(), nullptr, nullptr, no_passphrase));
  if (key == nullptr)
    return InvalidArgument("--tls-key {} holds no unprotected private key in PEM: {}", file, LastOpenSslError());
  return key;
}

std::string TimeText(const ASN1_TIME* time) {
  const Bio bio(BIO_new(BIO_s_mem()));
  char* text = nullptr;
  if (bio == nullptr || ASN1_TIME_print(bio.get(), time) != 1) return "?";
  const long length = BIO_get_mem_data(bio.get(), &text);
  return std::string(text, static_cast<size_t>(length));
}

absl::Status CheckFiles(const PeerTlsOptions& options) {
  if (options.cert_file.empty() || options.key_file.empty() || options.ca_file.empty())
    return absl::InvalidArgumentError("--tls-cert, --tls-key and --tls-ca: give all three, or none");
  SPLICE_ASSIGN_OR_RETURN(const Certificate certificate, ReadCertificate("--tls-cert", options.cert_file));
  SPLICE_ASSIGN_OR_RETURN(const Key key, ReadKey(options.key_file));
  SPLICE_RETURN_IF_ERROR(ReadCertificate("--tls-ca", options.ca_file).status());
  if (X509_check_private_key(certificate.get(), key.get()) != 1) {
    ERR_clear_error();
    return InvalidArgument("--tls-key {} is not the key of the certificate --tls-cert {}", options.key_file,
                           options.cert_file);
  }
  const ASN1_TIME *begin = X509_get0_notBefore(certificate.get()), *end = X509_get0_notAfter(certificate.get());
  if (X509_cmp_current_time(end) < 0)
    return InvalidArgument("--tls-cert {} has expired: it was valid until {}", options.cert_file, TimeText(end));
  if (X509_cmp_current_time(begin) > 0)
    return InvalidArgument("--tls-cert {} is not valid before {}: is the clock right?", options.cert_file,
                           TimeText(begin));
  log::Info("tls.on", log::F("cert", options.cert_file), log::F("valid_until", TimeText(end)));
  return absl::OkStatus();
}

}  // namespace

void PeerTlsOptions::Register(CLI::App& app) {
  app.add_option("--tls-cert", cert_file,
                 "Certificate (PEM) that this program shows to the other programs; with --tls-key and --tls-ca every "
                 "connection between programs is encrypted and both ends must prove who they are");
  app.add_option("--tls-key", key_file, "Private key (PEM) of --tls-cert");
  app.add_option("--tls-ca", ca_file, "CA certificates (PEM) that have signed those of the other programs");
  app.add_option("--tls-server-name", server_name,
                 "DNS name that certificates of the programs which this one calls must have; empty: the host or "
                 "address that is called");
}

absl::StatusOr<std::shared_ptr<const PeerTls>> PeerTls::Load(const PeerTlsOptions& options) {
  if (!options.enabled()) {
    if (!options.server_name.empty())
      return absl::InvalidArgumentError("--tls-server-name needs --tls-cert, --tls-key and --tls-ca");
    return nullptr;
  }
  SPLICE_RETURN_IF_ERROR(CheckFiles(options));
  return std::shared_ptr<const PeerTls>(new PeerTls(options));
}

PeerTls::PeerTls(const PeerTlsOptions& options)
    : options_(options),
      provider_(std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
          options.key_file, options.cert_file, options.ca_file, static_cast<unsigned>(options.refresh.count()))) {}

std::shared_ptr<grpc::ServerCredentials> PeerTls::MakeServerCredentials() const {
  grpc::experimental::TlsServerCredentialsOptions options(provider_);
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  return grpc::experimental::TlsServerCredentials(options);
}

std::shared_ptr<grpc::Channel> MakePeerChannel(const std::string& address, const PeerTls* tls,
                                               grpc::ChannelArguments arguments) {
  if (tls == nullptr) return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  // Whom the certificate must name is gRPC's default check, of DNS names and IP addresses.
  if (!tls->options_.server_name.empty()) arguments.SetSslTargetNameOverride(tls->options_.server_name);
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(tls->provider_);
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  return grpc::CreateCustomChannel(address, grpc::experimental::TlsCredentials(options), arguments);
}

}  // namespace spl
