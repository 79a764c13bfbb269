// How a program gets into an etcd that does not let everybody in: TLS, a client certificate, a user and a password.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/support/channel_arguments.h>

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/status.h"

namespace CLI {
class App;
}

namespace spl::membership {

struct EtcdAccessOptions {
  // PEM files. The CA that has signed etcd's certificate: with it every connection is encrypted, and etcd must prove
  // that it is the host that was dialled. Certificate and key, both or neither, are shown to etcd. Files that are
  // replaced are used for new connections, without a restart.
  std::string ca_file, cert_file, key_file;
  // Of etcd's own users (etcdctl user add); the password is the file's first line, and is read whenever it is asked
  // for. Both or neither.
  std::string user, password_file;
  std::chrono::seconds refresh{10};  // how often the PEM files are looked at

  // Adds --etcd-ca, --etcd-cert, --etcd-key, --etcd-user and --etcd-password-file.
  void Register(CLI::App& app);
  // InvalidArgument, naming flag and file: flags that belong together are missing, or a file is not what it must be.
  absl::Status Check() const;
};

// A channel to one address of etcd.
std::shared_ptr<grpc::Channel> MakeEtcdChannel(const std::string& endpoint, const EtcdAccessOptions& access,
                                               const grpc::ChannelArguments& arguments);

// The token that etcd gives a user, and puts into calls. Used by one thread.
class EtcdToken {
 public:
  explicit EtcdToken(const EtcdAccessOptions& access) : access_(access) {}
  // Without a user nothing is needed, and Get and AddTo do nothing.
  bool needed() const { return !access_.user.empty() && token_.empty(); }
  // Asks etcd for a token. The call's errors; FailedPrecondition: the password cannot be read.
  absl::Status Get(grpc::ClientContext& context, const std::shared_ptr<grpc::Channel>& channel);
  void AddTo(grpc::ClientContext& context) const;
  // Whether `status`, of a call that had the token, may come of it: it is forgotten then, and the call may be tried
  // with another one. etcd forgets tokens that were not used for minutes, when it restarts, and when users change.
  bool Rejected(const absl::Status& status);

 private:
  const EtcdAccessOptions& access_;
  std::string token_;
};

}  // namespace spl::membership
