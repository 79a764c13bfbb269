#include "tests/cluster/processes.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio.hpp>
#include <boost/beast.hpp>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <sstream>

extern char** environ;

namespace spl::test {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using Clock = std::chrono::steady_clock;
using tcp = asio::ip::tcp;

std::string TemporaryFile(const char* stem) {
  std::string path = testing::TempDir() + stem + "-XXXXXX";
  const int fd = ::mkstemp(path.data());
  if (fd >= 0) ::close(fd);
  return path;
}

std::string ReadAll(const std::string& path) {
  std::ifstream in(path);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

int Spawn(const std::vector<std::string>& argv, int stdout_fd, const std::string& stderr_path) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, stdout_fd, 1);
  posix_spawn_file_actions_addopen(&actions, 2, stderr_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  std::vector<char*> args;
  for (const std::string& arg : argv) args.push_back(const_cast<char*>(arg.c_str()));
  args.push_back(nullptr);
  int pid = -1;
  if (::posix_spawn(&pid, args[0], &actions, nullptr, args.data(), environ) != 0) pid = -1;
  posix_spawn_file_actions_destroy(&actions);
  return pid;
}

// Waits on the kernel's word about the child, not on a clock.
int WaitPid(int pid, std::chrono::seconds timeout) {
  const auto deadline = Clock::now() + timeout;
  const int fd = static_cast<int>(::syscall(434 /* pidfd_open */, pid, 0));
  pollfd entry{fd, POLLIN, 0};
  while (fd >= 0 && Clock::now() < deadline) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (::poll(&entry, 1, static_cast<int>(std::max<int64_t>(left, 1))) > 0) break;
  }
  if (fd >= 0) ::close(fd);
  int status = 0;
  if (::waitpid(pid, &status, WNOHANG) != pid) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

std::string BinDir() {
  if (const char* dir = std::getenv("SPLICE_BIN_DIR")) return dir;
  return std::filesystem::read_symlink("/proc/self/exe").parent_path().parent_path() / "bin";
}

std::unique_ptr<Process> Process::StartAndWaitReady(const std::vector<std::string>& argv,
                                                    std::chrono::seconds timeout) {
  int pipe_fds[2];
  if (::pipe2(pipe_fds, O_CLOEXEC) != 0) return nullptr;
  auto process = std::unique_ptr<Process>(new Process);
  process->stderr_path_ = TemporaryFile("splice-stderr");
  process->stdout_fd_ = pipe_fds[0];
  process->pid_ = Spawn(argv, pipe_fds[1], process->stderr_path_);
  ::close(pipe_fds[1]);
  std::string line;
  const auto deadline = Clock::now() + timeout;
  while (line.find('\n') == std::string::npos) {
    pollfd entry{pipe_fds[0], POLLIN, 0};
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    char c = 0;
    if (left <= 0 || ::poll(&entry, 1, static_cast<int>(left)) <= 0 || ::read(pipe_fds[0], &c, 1) != 1) {
      ADD_FAILURE() << argv[0] << " did not become ready; it said: " << process->Stderr();
      return nullptr;
    }
    line += c;
  }
  std::istringstream words(line);
  std::string word;
  words >> word;
  EXPECT_EQ(word, "ready") << line;
  while (words >> word) {
    const size_t equals = word.find('=');
    if (equals != std::string::npos) process->ready_[word.substr(0, equals)] = word.substr(equals + 1);
  }
  return process;
}

Process::Result Process::Run(const std::vector<std::string>& argv, std::chrono::seconds timeout,
                             const std::function<void(int)>& meanwhile) {
  const std::string out = TemporaryFile("splice-stdout"), err = TemporaryFile("splice-stderr");
  const int out_fd = ::open(out.c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC);
  const int pid = Spawn(argv, out_fd, err);
  ::close(out_fd);
  if (meanwhile && pid > 0) meanwhile(pid);
  Result result;
  result.exit_code = WaitPid(pid, timeout);
  if (result.exit_code == -1) {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
  result.out = ReadAll(out);
  result.err = ReadAll(err);
  ::unlink(out.c_str());
  ::unlink(err.c_str());
  return result;
}

Process::~Process() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  if (stdout_fd_ >= 0) ::close(stdout_fd_);
  if (testing::Test::HasFailure()) std::fprintf(stderr, "--- stderr of a process ---\n%s", Stderr().c_str());
  ::unlink(stderr_path_.c_str());
}

void Process::Signal(int signal) {
  if (pid_ > 0) ::kill(pid_, signal);
}

int Process::WaitForExit(std::chrono::seconds timeout) {
  if (pid_ < 0) return exit_code_;  // waiting for pid -1 would take the end of any other child
  exit_code_ = WaitPid(pid_, timeout);
  if (exit_code_ != -1) pid_ = -1;
  return exit_code_;
}

uint64_t Process::ResidentBytes() const {
  std::ifstream status("/proc/" + std::to_string(pid_) + "/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmRSS:")) return std::stoull(line.substr(6)) << 10;
  }
  return 0;
}

std::string Process::Stderr() const { return ReadAll(stderr_path_); }

std::unique_ptr<ProcessCluster> ProcessCluster::Start(const ClusterConfig& config) {
  auto cluster = std::make_unique<ProcessCluster>();
  std::vector<std::string> store = {BinDir() + "/splice-kvstore", "--listen", "127.0.0.1:0", "--metrics-listen",
                                    "127.0.0.1:0"};
  if (!config.data_dir.empty()) store.insert(store.end(), {"--data-dir", config.data_dir});
  store.insert(store.end(), config.store_flags.begin(), config.store_flags.end());
  cluster->store = Process::StartAndWaitReady(store);
  if (!cluster->store) return nullptr;
  std::string prefill_list, decode_list;
  const auto start = [&](const char* program, const std::vector<std::string>& flags,
                         std::vector<std::unique_ptr<Process>>& processes, std::string& list) {
    std::vector<std::string> argv = {BinDir() + "/" + program, "--model", config.model_dir, "--kv-transport",
                                     config.transport};
    argv.insert(argv.end(), flags.begin(), flags.end());
    // Workers that share a device need sizes (--kv-bytes auto).
    if (std::find(flags.begin(), flags.end(), "--kv-bytes") == flags.end())
      argv.insert(argv.end(), {"--kv-bytes", "1GiB"});
    auto process = Process::StartAndWaitReady(argv);
    if (!process) return false;
    list += (list.empty() ? "" : ",") + process->ready("grpc");
    processes.push_back(std::move(process));
    return true;
  };
  std::vector<std::string> prefill_flags = config.prefill_flags;
  std::vector<std::string> decode_flags = config.decode_flags;
  // Fetches must not depend on the machine's speed, unless the test is about that.
  const bool decides = std::find(prefill_flags.begin(), prefill_flags.end(), "--fetch") != prefill_flags.end();
  if (config.prefill_uses_store && !decides) prefill_flags.insert(prefill_flags.end(), {"--fetch", "always"});
  if (config.decode_uses_store) decode_flags.insert(decode_flags.end(), {"--fetch", "always"});
  if (config.prefill_uses_store) prefill_flags.insert(prefill_flags.end(), {"--store", cluster->store->ready("grpc")});
  if (config.decode_uses_store) decode_flags.insert(decode_flags.end(), {"--store", cluster->store->ready("grpc")});
  for (int i = 0; i < config.num_decode; ++i)
    if (!start("splice-decode", decode_flags, cluster->decode, decode_list)) return nullptr;
  for (int i = 0; i < config.num_prefill; ++i)
    if (!start("splice-prefill", prefill_flags, cluster->prefill, prefill_list)) return nullptr;
  std::vector<std::string> router = {BinDir() + "/splice-router",
                                     "--model",
                                     config.model_dir,
                                     "--http",
                                     "127.0.0.1:0",
                                     "--grpc",
                                     "127.0.0.1:0",
                                     "--prefill",
                                     prefill_list,
                                     "--decode",
                                     decode_list};
  if (config.prefill_uses_store) router.insert(router.end(), {"--store", cluster->store->ready("grpc")});
  router.insert(router.end(), config.router_flags.begin(), config.router_flags.end());
  cluster->router_argv = router;
  cluster->router = Process::StartAndWaitReady(router);
  if (!cluster->router || !cluster->WaitReady()) return nullptr;
  return cluster;
}

namespace {

bool WaitRouterReady(const std::string& http) {
  const auto deadline = Clock::now() + std::chrono::seconds(30);
  std::mutex mutex;
  std::condition_variable never;
  std::unique_lock lock(mutex);
  while (Clock::now() < deadline) {
    if (HttpGet(http, "/readyz").status == 200) return true;
    never.wait_for(lock, std::chrono::milliseconds(10));
  }
  ADD_FAILURE() << "the cluster did not become ready";
  return false;
}

}  // namespace

bool ProcessCluster::WaitReady() { return WaitRouterReady(http()); }

std::unique_ptr<Process> ProcessCluster::StartAnotherRouter() const {
  auto another = Process::StartAndWaitReady(router_argv);
  if (another == nullptr || !WaitRouterReady(another->ready("http"))) return nullptr;
  return another;
}

namespace {

struct Connection {
  asio::io_context io;
  beast::tcp_stream stream{io};
  beast::flat_buffer buffer;

  bool Open(const std::string& address) {
    const size_t colon = address.rfind(':');
    beast::error_code error;
    const auto host = asio::ip::make_address(address.substr(0, colon), error);
    if (error) return false;
    stream.connect(tcp::endpoint(host, static_cast<uint16_t>(std::stoi(address.substr(colon + 1)))), error);
    return !error;
  }
};

http::request<http::string_body> MakeRequest(http::verb verb, const std::string& address, const std::string& path,
                                             const std::string& body,
                                             const std::map<std::string, std::string>& headers) {
  http::request<http::string_body> request{verb, path, 11};
  request.set(http::field::host, address);
  if (verb == http::verb::post) request.set(http::field::content_type, "application/json");
  for (const auto& [name, value] : headers) request.set(name, value);
  request.body() = body;
  request.prepare_payload();
  return request;
}

HttpReply Exchange(http::verb verb, const std::string& address, const std::string& path, const std::string& body,
                   const std::map<std::string, std::string>& headers) {
  HttpReply reply;
  Connection connection;
  if (!connection.Open(address)) return reply;
  beast::error_code error;
  // A server may answer before it has read a body that is too large: read the answer even if writing failed.
  http::write(connection.stream, MakeRequest(verb, address, path, body, headers), error);
  http::response_parser<http::string_body> parser;
  parser.body_limit(1ull << 30);
  http::read(connection.stream, connection.buffer, parser, error);
  if (error && !parser.is_header_done()) return reply;
  reply.status = parser.get().result_int();
  reply.body = parser.get().body();
  for (const auto& field : parser.get()) {
    std::string name(field.name_string());
    for (char& c : name) c = static_cast<char>(std::tolower(c));
    reply.headers[name] = std::string(field.value());
  }
  return reply;
}

}  // namespace

HttpReply HttpGet(const std::string& address, const std::string& path) {
  return Exchange(http::verb::get, address, path, "", {});
}

HttpReply HttpCall(const std::string& address, const std::string& method, const std::string& path,
                   const std::string& body) {
  return Exchange(http::string_to_verb(method), address, path, body, {});
}

HttpReply HttpPost(const std::string& address, const std::string& path, const std::string& body,
                   const std::map<std::string, std::string>& headers) {
  return Exchange(http::verb::post, address, path, body, headers);
}

struct SseStream::Impl {
  Connection connection;
  http::response_parser<http::buffer_body> parser;
  std::string text;  // decoded body not yet handed out
  bool ended = false;
  int status = 0;
};

SseStream::SseStream(const std::string& address, const std::string& path, const std::string& body)
    : impl_(std::make_unique<Impl>()) {
  beast::error_code error;
  impl_->ended = true;
  if (!impl_->connection.Open(address)) return;
  http::write(impl_->connection.stream, MakeRequest(http::verb::post, address, path, body, {}), error);
  impl_->parser.body_limit(1ull << 30);
  http::read_header(impl_->connection.stream, impl_->connection.buffer, impl_->parser, error);
  if (error) return;
  impl_->status = static_cast<int>(impl_->parser.get().result_int());
  impl_->ended = false;
}

SseStream::~SseStream() = default;
int SseStream::status() const { return impl_->status; }

std::string SseStream::Next() {
  while (true) {
    const size_t end = impl_->text.find("\n\n");
    if (end != std::string::npos) {
      const std::string event = impl_->text.substr(0, end);
      impl_->text.erase(0, end + 2);
      if (event.rfind("data: ", 0) == 0) return event.substr(6);
      continue;
    }
    if (impl_->ended) return "";
    char chunk[4096];
    auto& body = impl_->parser.get().body();
    body.data = chunk;
    body.size = sizeof(chunk);
    beast::error_code error;
    http::read_some(impl_->connection.stream, impl_->connection.buffer, impl_->parser, error);
    impl_->text.append(chunk, sizeof(chunk) - body.size);
    if (error == http::error::need_buffer) error = {};
    if (error || impl_->parser.is_done()) impl_->ended = true;
  }
}

double MetricValue(const std::string& exposition, const std::string& name) {
  std::istringstream lines(exposition);
  std::string line;
  double sum = 0;
  bool found = false;
  while (std::getline(lines, line)) {
    if (line.rfind(name, 0) != 0) continue;
    const char next = line.size() > name.size() ? line[name.size()] : '\0';
    if (next != ' ' && next != '{') continue;
    sum += std::stod(line.substr(line.rfind(' ') + 1));
    found = true;
  }
  return found ? sum : -1;
}

}  // namespace spl::test
