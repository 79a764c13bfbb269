// Mutual TLS between the programs. Each program shows a certificate to its callers and to the programs that it calls,
// and accepts only certificates signed by its CA. TLS must be on in all programs or in none: a program with TLS and one
// without cannot talk.
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
  // PEM files: the certificate followed by its intermediates, its private key, and the CAs whose certificates are
  // accepted. Set all or none. The certificate serves as server and as client: its extended key usages, if any, must
  // name both.
  std::string cert_file, key_file, ca_file;
  // DNS name that a server's certificate must have among its alternative names. Empty: the host or IP address that was
  // dialled. Set it if addresses of workers are not known when certificates are made, as in Kubernetes; all servers
  // then share one name.
  std::string server_name;
  // How often the files are checked for changes. New connections use the new contents; open ones stay as they are.
  std::chrono::seconds refresh{10};

  bool enabled() const { return !cert_file.empty() || !key_file.empty() || !ca_file.empty(); }
  // Adds --tls-cert, --tls-key, --tls-ca and --tls-server-name. This object must outlive `app`.
  void Register(CLI::App& app);
};

// A program's certificate and the CAs that it trusts; one object per process is enough. Owns gRPC's thread that reads
// the files again. Immutable; any thread may call. Channels and servers may outlive it.
class PeerTls {
 public:
  // Null: the options name no file. InvalidArgument names flag and file: some of the three flags are missing, a file
  // cannot be read or is not PEM, key and certificate do not belong together, or the certificate is not valid now.
  static absl::StatusOr<std::shared_ptr<const PeerTls>> Load(const PeerTlsOptions& options);

  // Requires a certificate of every client. TLS 1.2 or 1.3.
  std::shared_ptr<grpc::ServerCredentials> MakeServerCredentials() const;

 private:
  friend std::shared_ptr<grpc::Channel> MakePeerChannel(const std::string&, const PeerTls*, grpc::ChannelArguments);
  explicit PeerTls(const PeerTlsOptions& options);

  const PeerTlsOptions options_;
  const std::shared_ptr<grpc::experimental::CertificateProviderInterface> provider_;
};

// Makes a channel to another program of the cluster; all such channels are made here. `tls` null: no encryption and no
// check of the peer. With TLS, calls to a peer that cannot prove its identity fail with Unavailable, as if it were
// down.
std::shared_ptr<grpc::Channel> MakePeerChannel(const std::string& address, const PeerTls* tls,
                                               grpc::ChannelArguments arguments = {});

}  // namespace spl
