#include "services/base/tls.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/tls_credentials_options.h>

#include <CLI/App.hpp>
#include <utility>

#include "services/base/certificate_files.h"
#include "services/base/log.h"
#include "services/base/status.h"

namespace spl {
namespace {

absl::Status CheckFiles(const PeerTlsOptions& options) {
  if (options.cert_file.empty() || options.key_file.empty() || options.ca_file.empty())
    return absl::InvalidArgumentError("--tls-cert, --tls-key and --tls-ca: give all three, or none");
  SPLICE_ASSIGN_OR_RETURN(const Certificate certificate,
                          ReadCertificateFiles({"--tls-cert", options.cert_file, "--tls-key", options.key_file}));
  SPLICE_RETURN_IF_ERROR(ReadCaFile("--tls-ca", options.ca_file).status());
  log::Info("tls.on", log::F("cert", options.cert_file), log::F("valid_until", certificate.valid_until_text));
  return absl::OkStatus();
}

}  // namespace

void PeerTlsOptions::Register(CLI::App& app) {
  app.add_option("--tls-cert", cert_file,
                 "Certificate (PEM) of this program for gRPC to the other programs; with --tls-key and --tls-ca these "
                 "connections use mutual TLS");
  app.add_option("--tls-key", key_file, "Private key (PEM) of --tls-cert");
  app.add_option("--tls-ca", ca_file, "CA certificates (PEM) that signed the certificates of the other programs");
  app.add_option("--tls-server-name", server_name,
                 "DNS name that the certificates of called programs must have; empty: the host or address of the call");
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
