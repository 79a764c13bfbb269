#include "services/base/public_tls.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>

#include <CLI/App.hpp>

#include "services/base/status.h"
#include "services/base/tls_stream.h"

namespace spl {

void PublicTlsOptions::Register(CLI::App& app) {
  app.add_option("--public-tls-cert", cert_file,
                 "Certificate (PEM, with its chain) of the HTTP and gRPC APIs: with --public-tls-key clients must use "
                 "https:// and TLS; replaced files are used without a restart");
  app.add_option("--public-tls-key", key_file, "Private key (PEM) of --public-tls-cert");
}

absl::Status PublicTlsOptions::Check() const {
  if (!enabled()) return absl::OkStatus();
  if (cert_file.empty() || key_file.empty())
    return absl::InvalidArgumentError("--public-tls-cert and --public-tls-key: give both, or neither");
  SPLICE_ASSIGN_OR_RETURN(const Certificate certificate, ReadCertificateFiles(files()));
  return MakeHttpsServerContext(files(), certificate).status();
}

std::shared_ptr<grpc::ServerCredentials> MakePublicServerCredentials(const PublicTlsOptions& options) {
  grpc::experimental::TlsServerCredentialsOptions tls(
      std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
          options.key_file, options.cert_file, static_cast<unsigned>(options.refresh.count())));
  tls.watch_identity_key_cert_pairs();
  tls.set_cert_request_type(GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
  return grpc::experimental::TlsServerCredentials(tls);
}

}  // namespace spl
