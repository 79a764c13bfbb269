// A real etcd of one member on free loopback ports, for tests.
#pragma once

#include <grpcpp/channel.h>

#include <memory>
#include <string>

#include "services/base/tls.h"

namespace spl::testing {

class EtcdProcess {
 public:
  // Starts etcd with its data in `data_dir` and waits until it is healthy. Fails the test and returns null when it is
  // not installed (./dev test installs it) or does not come up.
  // `tls`: it serves with this certificate, and wants one of the same CA from its clients.
  static std::unique_ptr<EtcdProcess> Start(const std::string& data_dir, const PeerTlsOptions& tls = {});
  ~EtcdProcess();  // killed

  // A channel of a client that is let in.
  std::shared_ptr<grpc::Channel> Connect() const;
  const std::string& endpoint() const { return endpoint_; }  // the same after a restart
  void Signal(int signal);
  void Kill();     // SIGKILL, and waits for its end
  bool Restart();  // after Kill, with what is in its folder
  void Erase();    // its folder, while it does not run

 private:
  EtcdProcess() = default;
  bool Launch();

  std::string data_dir_, endpoint_, peer_;
  PeerTlsOptions tls_;
  int pid_ = -1;
};

}  // namespace spl::testing
