// A real etcd of one member on free loopback ports, for tests.
#pragma once

#include <memory>
#include <string>

namespace spl::testing {

class EtcdProcess {
 public:
  // Starts etcd with its data in `data_dir` and waits until it is healthy. Fails the test and returns null when it is
  // not installed (./dev test installs it) or does not come up.
  static std::unique_ptr<EtcdProcess> Start(const std::string& data_dir);
  ~EtcdProcess();  // killed

  const std::string& endpoint() const { return endpoint_; }  // the same after a restart
  void Signal(int signal);
  void Kill();     // SIGKILL, and waits for its end
  bool Restart();  // after Kill, with what is in its folder
  void Erase();    // its folder, while it does not run

 private:
  EtcdProcess() = default;
  bool Launch();

  std::string data_dir_, endpoint_, peer_;
  int pid_ = -1;
};

}  // namespace spl::testing
