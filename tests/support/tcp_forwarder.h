// A link that a test can cut: bytes go through a loopback port to another address, until they do not.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace spl::testing {

// Thread-safe. Stops with its destruction.
class TcpForwarder {
 public:
  // `target` is HOST:PORT with a numeric host.
  explicit TcpForwarder(const std::string& target);
  ~TcpForwarder();

  std::string address() const;
  // Closes all connections and refuses new ones, until Mend.
  void Cut();
  // Connections stay open and nothing arrives, as when packets are dropped; new connections are taken and hang, too.
  void Drop();
  void Mend();

 private:
  enum class State { kOpen, kCut, kDropping };
  struct Link;

  void Accept();
  void Pump(std::shared_ptr<Link> link, bool to_target);

  boost::asio::io_context io_;
  boost::asio::ip::tcp::endpoint target_;
  boost::asio::ip::tcp::acceptor acceptor_{io_};
  State state_ = State::kOpen;             // io_'s thread
  std::set<std::shared_ptr<Link>> links_;  // io_'s thread
  std::thread thread_;
};

}  // namespace spl::testing
