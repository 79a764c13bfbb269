#include "tests/support/etcd_process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <thread>
#include <vector>

#include "etcd/v3/rpc.grpc.pb.h"

extern char** environ;

namespace spl::testing {
namespace {

constexpr char kProgram[] = "/usr/bin/etcd";

// A port that was free a moment ago: etcd must be told one, so that it has the same after a restart.
int FreePort() {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  const bool bound = ::bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                     ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  ::close(fd);
  return bound ? ntohs(address.sin_port) : 0;
}

// It answers; that it wants a user is an answer.
bool Healthy(const std::shared_ptr<grpc::Channel>& channel) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (std::chrono::steady_clock::now() < deadline) {
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(2));
    etcdserverpb::RangeRequest request;
    request.set_key("health");
    etcdserverpb::RangeResponse response;
    const grpc::Status status = etcdserverpb::KV::NewStub(channel)->Range(&context, request, &response);
    if (status.ok() || status.error_code() == grpc::StatusCode::INVALID_ARGUMENT ||
        status.error_code() == grpc::StatusCode::PERMISSION_DENIED)
      return true;
  }
  return false;
}

}  // namespace

std::unique_ptr<EtcdProcess> EtcdProcess::Start(const std::string& data_dir, const PeerTlsOptions& tls) {
  if (::access(kProgram, X_OK) != 0) {
    ADD_FAILURE() << kProgram << " is missing: install the package etcd-server, as ./dev test does";
    return nullptr;
  }
  for (int attempt = 0; attempt < 3; ++attempt) {
    auto process = std::unique_ptr<EtcdProcess>(new EtcdProcess);
    process->data_dir_ = data_dir;
    process->tls_ = tls;
    process->endpoint_ = "127.0.0.1:" + std::to_string(FreePort());
    process->peer_ = "127.0.0.1:" + std::to_string(FreePort());
    if (process->Launch()) return process;
  }
  ADD_FAILURE() << "etcd did not start";
  return nullptr;
}

EtcdProcess::~EtcdProcess() { Kill(); }

bool EtcdProcess::Launch() {
  const std::string client = (tls_.enabled() ? "https://" : "http://") + endpoint_, peer = "http://" + peer_;
  std::vector<std::string> argv = {kProgram,
                                   "--name=test",
                                   "--data-dir=" + data_dir_,
                                   "--listen-client-urls=" + client,
                                   "--advertise-client-urls=" + client,
                                   "--listen-peer-urls=" + peer,
                                   "--initial-advertise-peer-urls=" + peer,
                                   "--initial-cluster=test=" + peer,
                                   "--heartbeat-interval=50",
                                   "--election-timeout=500",
                                   "--logger=zap",
                                   "--log-level=error",
                                   "--log-outputs=/dev/null"};
  if (tls_.enabled()) {
    argv.insert(argv.end(), {"--cert-file=" + tls_.cert_file, "--key-file=" + tls_.key_file,
                             "--trusted-ca-file=" + tls_.ca_file, "--client-cert-auth"});
  }
  std::vector<char*> args;
  for (const std::string& arg : argv) args.push_back(const_cast<char*>(arg.c_str()));
  args.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
  if (::posix_spawn(&pid_, kProgram, &actions, nullptr, args.data(), environ) != 0) pid_ = -1;
  posix_spawn_file_actions_destroy(&actions);
  return pid_ > 0 && Healthy(Connect());
}

std::shared_ptr<grpc::Channel> EtcdProcess::Connect() const {
  const auto tls = PeerTls::Load(tls_);
  EXPECT_TRUE(tls.ok()) << tls.status();
  return tls.ok() ? MakePeerChannel(endpoint_, tls->get()) : nullptr;
}

void EtcdProcess::Signal(int signal) {
  if (pid_ > 0) ::kill(pid_, signal);
}

void EtcdProcess::Kill() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

bool EtcdProcess::Restart() { return Launch(); }

void EtcdProcess::Erase() { std::filesystem::remove_all(data_dir_); }

}  // namespace spl::testing
