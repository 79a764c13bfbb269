// A link of a given rate and latency between two programs of one machine, for measurements of what is far away.
//
//   build/bench/splice_slow_link TARGET_HOST:PORT MB_PER_S LATENCY_MS      prints "ready address=127.0.0.1:PORT"
//
// All connections of one direction share the rate. Bytes wait for the line, travel for half of the latency, and at most
// half a MiB of a connection is under way, besides the buffers of its sockets. Ends with its standard input.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kPiece = 64 << 10;
constexpr size_t kPiecesUnderWay = 8;
constexpr int kSocketBytes = 256 << 10;

// When the last bit of a piece has left.
class Line {
 public:
  explicit Line(double bytes_per_s) : bytes_per_s_(bytes_per_s) {}
  Clock::time_point Send(size_t bytes) {
    std::lock_guard lock(mutex_);
    free_ = std::max(free_, Clock::now()) +
            std::chrono::nanoseconds(static_cast<int64_t>(static_cast<double>(bytes) / bytes_per_s_ * 1e9));
    return free_;
  }

 private:
  const double bytes_per_s_;
  std::mutex mutex_;  // guards the next one
  Clock::time_point free_;
};

struct Pipe {
  std::mutex mutex;  // guards all below
  std::condition_variable changed;
  std::deque<std::pair<Clock::time_point, std::vector<char>>> under_way;  // with the time of arrival
  bool ended = false;
};

void Read(int from, Line& line, std::chrono::nanoseconds travel, const std::shared_ptr<Pipe>& pipe) {
  for (std::vector<char> piece(kPiece);; piece.resize(kPiece)) {
    const ssize_t size = recv(from, piece.data(), piece.size(), 0);
    std::unique_lock lock(pipe->mutex);
    if (size <= 0) break;
    piece.resize(static_cast<size_t>(size));
    pipe->under_way.emplace_back(line.Send(piece.size()) + travel, piece);
    pipe->changed.notify_all();
    pipe->changed.wait(lock, [&] { return pipe->under_way.size() < kPiecesUnderWay || pipe->ended; });
    if (pipe->ended) return;
  }
  std::lock_guard lock(pipe->mutex);
  pipe->ended = true;
  pipe->changed.notify_all();
}

void Write(int to, const std::shared_ptr<Pipe>& pipe) {
  std::unique_lock lock(pipe->mutex);
  while (true) {
    pipe->changed.wait(lock, [&] { return !pipe->under_way.empty() || pipe->ended; });
    if (pipe->under_way.empty()) break;
    const auto [arrives, piece] = std::move(pipe->under_way.front());
    lock.unlock();
    std::this_thread::sleep_until(arrives);
    size_t sent = 0;
    while (sent < piece.size()) {
      const ssize_t size = send(to, piece.data() + sent, piece.size() - sent, MSG_NOSIGNAL);
      if (size <= 0) break;
      sent += static_cast<size_t>(size);
    }
    lock.lock();
    pipe->under_way.pop_front();
    if (sent < piece.size()) pipe->ended = true;
    pipe->changed.notify_all();
    if (sent < piece.size()) break;
  }
  shutdown(to, SHUT_WR);
}

void Tune(int socket) {
  const int one = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  setsockopt(socket, SOL_SOCKET, SO_RCVBUF, &kSocketBytes, sizeof kSocketBytes);
  setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &kSocketBytes, sizeof kSocketBytes);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return std::fprintf(stderr, "usage: splice_slow_link HOST:PORT MB_PER_S LATENCY_MS\n"), 2;
  const std::string target = argv[1];
  const size_t colon = target.rfind(':');
  sockaddr_in to{.sin_family = AF_INET, .sin_port = htons(static_cast<uint16_t>(std::atoi(argv[1] + colon + 1)))};
  inet_pton(AF_INET, target.substr(0, colon).c_str(), &to.sin_addr);
  Line there(std::atof(argv[2]) * 1e6), back(std::atof(argv[2]) * 1e6);
  const std::chrono::nanoseconds travel(static_cast<int64_t>(std::atof(argv[3]) * 1e6 / 2));
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  Tune(listener);
  sockaddr_in here{.sin_family = AF_INET, .sin_port = 0};
  inet_pton(AF_INET, "127.0.0.1", &here.sin_addr);
  socklen_t size = sizeof here;
  if (bind(listener, reinterpret_cast<sockaddr*>(&here), size) != 0 || listen(listener, 64) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&here), &size) != 0)
    return std::perror("listen"), 1;
  std::printf("ready address=127.0.0.1:%d\n", ntohs(here.sin_port));
  std::fflush(stdout);
  std::thread([&] {
    while (true) {
      const int client = accept(listener, nullptr, nullptr), server = socket(AF_INET, SOCK_STREAM, 0);
      Tune(client);
      Tune(server);
      if (connect(server, reinterpret_cast<sockaddr*>(&to), sizeof to) != 0) {
        close(client);
        close(server);
        continue;
      }
      for (const bool forth : {true, false}) {
        auto pipe = std::make_shared<Pipe>();
        std::thread([=, &there, &back] { Read(forth ? client : server, forth ? there : back, travel, pipe); }).detach();
        std::thread([=] { Write(forth ? server : client, pipe); }).detach();
      }
    }
  }).detach();
  while (std::getchar() != EOF) {
  }
  std::_Exit(0);  // the threads wait in system calls
}
