// Real programs for cluster tests: started on free loopback ports, killed at the end of the test whatever happens.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace spl::test {

// One child process. Its stdout is read by the test, its stderr goes to a file that is printed when a test fails.
class Process {
 public:
  // Starts `argv` and waits for the line "ready k=v k=v" on stdout, at most `timeout`. Fails the test and returns null
  // when the process ends or stays silent.
  static std::unique_ptr<Process> StartAndWaitReady(const std::vector<std::string>& argv,
                                                    std::chrono::seconds timeout = std::chrono::seconds(60));
  // Starts `argv`, calls `meanwhile` with its pid, waits for its end, returns the exit code (-1 after `timeout`:
  // killed), stdout and stderr.
  struct Result {
    int exit_code = -1;
    std::string out, err;
  };
  static Result Run(const std::vector<std::string>& argv, std::chrono::seconds timeout = std::chrono::seconds(60),
                    const std::function<void(int)>& meanwhile = {});

  ~Process();  // SIGKILL unless it has ended

  const std::string& ready(const std::string& key) const { return ready_.at(key); }
  void Signal(int signal);
  // The exit code, 128 + signal for a killed process, or -1 when it still runs at the timeout.
  int WaitForExit(std::chrono::seconds timeout = std::chrono::seconds(60));
  std::string Stderr() const;
  // Memory that it has in RAM now; 0 once it has ended.
  uint64_t ResidentBytes() const;

 private:
  Process() = default;
  int pid_ = -1;
  int exit_code_ = -1;  // once it has ended
  int stdout_fd_ = -1;
  std::string stderr_path_;
  std::map<std::string, std::string> ready_;
};

// Directory with the programs under test.
std::string BinDir();

struct ClusterConfig {
  std::string model_dir;
  std::string transport = "auto";
  std::string data_dir;  // of the store; empty: memory only
  int num_prefill = 1, num_decode = 1;
  bool prefill_uses_store = true, decode_uses_store = false;
  std::vector<std::string> store_flags, prefill_flags, decode_flags, router_flags;
};

// The four programs as processes.
class ProcessCluster {
 public:
  static std::unique_ptr<ProcessCluster> Start(const ClusterConfig& config);
  const std::string& http() const { return router->ready("http"); }
  const std::string& grpc() const { return router->ready("grpc"); }
  bool WaitReady();  // /readyz of the router is 200
  // One more router over the same workers, once it is ready too.
  std::unique_ptr<Process> StartAnotherRouter() const;

  std::unique_ptr<Process> store, router;
  std::vector<std::unique_ptr<Process>> prefill, decode;
  std::vector<std::string> router_argv;
};

// --- A blocking HTTP client of the simplest kind. ---

struct HttpReply {
  int status = 0;
  std::map<std::string, std::string> headers;  // lower-case names
  std::string body;
};

// `address` is HOST:PORT. status 0 when the connection failed.
HttpReply HttpGet(const std::string& address, const std::string& path);
HttpReply HttpCall(const std::string& address, const std::string& method, const std::string& path,
                   const std::string& body);
HttpReply HttpPost(const std::string& address, const std::string& path, const std::string& body,
                   const std::map<std::string, std::string>& headers = {});

// A streamed POST: Next returns the next "data: " payload, or an empty string at the end of the stream.
class SseStream {
 public:
  SseStream(const std::string& address, const std::string& path, const std::string& body);
  ~SseStream();  // closes the connection: the client is gone
  int status() const;
  std::string Next();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The value of a series in Prometheus text, summed over labels; nothing when it is absent.
double MetricValue(const std::string& exposition, const std::string& name);

}  // namespace spl::test
