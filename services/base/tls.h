// Mutual TLS between the programs: each shows a certificate to whomever it calls and whoever calls it, and accepts
// only certificates that its CA has signed. Whether a program is on or off is the same everywhere: a program with TLS
// and one without cannot talk.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/support/channel_arguments.h>

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace CLI {
class App;
}

namespace spl {

struct PeerTlsOptions {
  // PEM files: certificate with what is between it and the CA, its private key, and the CAs that peers are accepted
  // from. All or none. The certificate is shown both by a server and by a client: a list of extended key usages, if it
  // has one, must name both.
  std::string cert_file, key_file, ca_file;
  // What a server's certificate must name (a DNS name among its alternative names). Empty: host or IP address that was
  // dialled. Needed where workers are dialled by addresses that nobody knows when certificates are made, as in
  // Kubernetes; all servers then share one name.
  std::string server_name;
  // How often the files are looked at. New connections use what they hold; those that are open stay.
  std::chrono::seconds refresh{10};

  bool enabled() const { return !cert_file.empty() || !key_file.empty() || !ca_file.empty(); }
  // Adds --tls-cert, --tls-key, --tls-ca and --tls-server-name. `app` is done before this goes.
  void Register(CLI::App& app);
};

// What a program knows about itself and whom it trusts; one per process is enough. Owns gRPC's thread that reads the
// files again. Immutable, any thread may call; channels and servers may outlive it.
class PeerTls {
 public:
  // Null when the options name no file. InvalidArgument, naming flag and file: some of the three flags are missing, a
  // file cannot be read or is no PEM, key and certificate do not belong together, or the certificate is not valid now.
  static absl::StatusOr<std::shared_ptr<const PeerTls>> Load(const PeerTlsOptions& options);

  // Requires a certificate of every client. TLS 1.2 or 1.3.
  std::shared_ptr<grpc::ServerCredentials> MakeServerCredentials() const;

 private:
  friend std::shared_ptr<grpc::Channel> MakePeerChannel(const std::string&, const PeerTls*, grpc::ChannelArguments);
  explicit PeerTls(const PeerTlsOptions& options);

  const PeerTlsOptions options_;
  const std::shared_ptr<grpc::experimental::CertificateProviderInterface> provider_;
};

// A channel to another program of the cluster; every one is made here. `tls` null: no encryption, whoever answers is
// believed. A peer that cannot prove who it is makes calls fail with Unavailable, like one that is down.
std::shared_ptr<grpc::Channel> MakePeerChannel(const std::string& address, const PeerTls* tls,
                                               grpc::ChannelArguments arguments = {});

}  // namespace spl
