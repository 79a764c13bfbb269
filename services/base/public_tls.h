// TLS of the ports that clients of the cluster call: the server shows a certificate, clients show API keys. What the
// programs show each other is services/base/tls.h.
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
  // PEM files: the certificate with what is between it and its CA, and its private key. Both, or neither: plain text.
  std::string cert_file, key_file;
  // How often the files are looked at. New connections use what they hold; those that are open stay.
  std::chrono::seconds refresh{10};

  bool enabled() const { return !cert_file.empty() || !key_file.empty(); }
  CertificateFiles files() const { return {"--public-tls-cert", cert_file, "--public-tls-key", key_file}; }
  // Adds --public-tls-cert and --public-tls-key. `app` is done before this goes.
  void Register(CLI::App& app);
  // What serving with them would say, before anything is started. InvalidArgument as of ReadCertificateFiles and
  // MakeHttpsServerContext, or one of the flags is missing; OK when neither is given.
  absl::Status Check() const;
};

// For a gRPC server; requires options that are enabled and pass Check. A thread of gRPC's reads the files again: they
// must be replaced both at once, since a pair that does not fit together serves nobody until it does.
std::shared_ptr<grpc::ServerCredentials> MakePublicServerCredentials(const PublicTlsOptions& options);

}  // namespace spl
