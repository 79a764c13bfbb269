// TLS of the ports for clients of the cluster: the server shows a certificate, clients show API keys.
// services/base/tls.h is for calls between programs.
#pragma once

#include <grpcpp/security/server_credentials.h>

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "services/base/certificate_files.h"

namespace CLI {
class App;
}

namespace spl {

struct PublicTlsOptions {
  // PEM files: the certificate followed by its intermediates, and its private key. Set both; neither: plain text.
  std::string cert_file, key_file;
  // How often the files are checked for changes. New connections use the new contents; open ones stay as they are.
  std::chrono::seconds refresh{10};

  bool enabled() const { return !cert_file.empty() || !key_file.empty(); }
  CertificateFiles files() const { return {"--public-tls-cert", cert_file, "--public-tls-key", key_file}; }
  // Adds --public-tls-cert and --public-tls-key. This object must outlive `app`.
  void Register(CLI::App& app);
  // Checks the files before anything starts. InvalidArgument as ReadCertificateFiles and MakeHttpsServerContext, or
  // one of the two flags is missing. OK if neither is given.
  absl::Status Check() const;
};

// Credentials for a gRPC server. REQUIRES: options that are enabled and pass Check. A gRPC thread reads the files again
// when they change. Replace both at once: a pair that does not fit together fails all new connections until it does.
std::shared_ptr<grpc::ServerCredentials> MakePublicServerCredentials(const PublicTlsOptions& options);

}  // namespace spl
