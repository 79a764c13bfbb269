// Access to an etcd that requires it: TLS, a client certificate, a user and a password.
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
  // PEM files. ca_file: the CA that has signed etcd's certificate; with it every connection is encrypted, and etcd must
  // prove that it is the host that was dialled. cert_file and key_file, both or neither, are shown to etcd. Replaced
  // files are used for new connections, without a restart.
  std::string ca_file, cert_file, key_file;
  // A user of etcd (etcdctl user add). The password is the first line of the file, which is read for every login. Set
  // both or neither.
  std::string user, password_file;
  std::chrono::seconds refresh{10};  // how often the PEM files are checked for changes

  // Adds --etcd-ca, --etcd-cert, --etcd-key, --etcd-user and --etcd-password-file.
  void Register(CLI::App& app);
  // InvalidArgument names flag and file: flags that belong together are missing, or a file has the wrong contents.
  absl::Status Check() const;
};

// Makes a channel to one address of etcd.
std::shared_ptr<grpc::Channel> MakeEtcdChannel(const std::string& endpoint, const EtcdAccessOptions& access,
                                               const grpc::ChannelArguments& arguments);

// The token that etcd gives a user, added to calls. Used by one thread.
class EtcdToken {
 public:
  explicit EtcdToken(const EtcdAccessOptions& access) : access_(access) {}
  // True if a token must be fetched with Get. Without a user no token is needed, and Get and AddTo do nothing.
  bool needed() const { return !access_.user.empty() && token_.empty(); }
  // Asks etcd for a token. Returns the errors of the call. FailedPrecondition: the password cannot be read.
  absl::Status Get(grpc::ClientContext& context, const std::shared_ptr<grpc::Channel>& channel);
  void AddTo(grpc::ClientContext& context) const;
  // True if `status`, from a call with the token, may be due to the token: it is forgotten then, and the call may be
  // tried with another one. etcd forgets tokens that were unused for minutes, when it restarts, and when users change.
  bool Rejected(const absl::Status& status);

 private:
  const EtcdAccessOptions& access_;
  std::string token_;
};

}  // namespace spl::membership
