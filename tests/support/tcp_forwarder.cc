#include "tests/support/tcp_forwarder.h"

#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>
#include <future>
#include <utility>

namespace spl::testing {

namespace asio = boost::asio;
using tcp = asio::ip::tcp;

struct TcpForwarder::Link {
  explicit Link(asio::io_context& io) : client(io), target(io) {}
  void Close() {
    boost::system::error_code ignored;
    client.close(ignored);
    target.close(ignored);
  }

  tcp::socket client, target;
  std::array<char, 65536> buffers[2];
  // Bytes that were read while nothing passes: they go on when the link is mended.
  size_t held[2] = {0, 0};
};

TcpForwarder::TcpForwarder(const std::string& target) {
  const size_t colon = target.rfind(':');
  target_ = {asio::ip::make_address(target.substr(0, colon)),
             static_cast<uint16_t>(std::stoi(target.substr(colon + 1)))};
  acceptor_.open(tcp::v4());
  acceptor_.bind({asio::ip::address_v4::loopback(), 0});
  acceptor_.listen();
  Accept();
  thread_ = std::thread([this] { io_.run(); });
}

TcpForwarder::~TcpForwarder() {
  io_.stop();
  thread_.join();
}

std::string TcpForwarder::address() const { return "127.0.0.1:" + std::to_string(acceptor_.local_endpoint().port()); }

void TcpForwarder::Cut() {
  std::promise<void> done;
  asio::post(io_, [&] {
    state_ = State::kCut;
    for (const auto& link : links_) link->Close();
    links_.clear();
    done.set_value();
  });
  done.get_future().wait();
}

void TcpForwarder::Drop() {
  std::promise<void> done;
  asio::post(io_, [&] {
    state_ = State::kDropping;
    done.set_value();
  });
  done.get_future().wait();
}

void TcpForwarder::Mend() {
  std::promise<void> done;
  asio::post(io_, [&] {
    state_ = State::kOpen;
    for (const auto& link : links_) {
      for (const bool to_target : {false, true}) {
        const size_t size = std::exchange(link->held[to_target], 0);
        if (size == 0) continue;
        asio::async_write(to_target ? link->target : link->client, asio::buffer(link->buffers[to_target], size),
                          [this, link, to_target](const boost::system::error_code& error, size_t) {
                            error ? link->Close() : Pump(link, to_target);
                          });
      }
    }
    done.set_value();
  });
  done.get_future().wait();
}

void TcpForwarder::Accept() {
  auto link = std::make_shared<Link>(io_);
  acceptor_.async_accept(link->client, [this, link](const boost::system::error_code& error) {
    boost::system::error_code failed = error;
    if (!failed && state_ != State::kCut) link->target.connect(target_, failed);
    if (failed || state_ == State::kCut) {
      link->Close();
    } else {
      links_.insert(link);
      Pump(link, true);
      Pump(link, false);
    }
    Accept();
  });
}

void TcpForwarder::Pump(std::shared_ptr<Link> link, bool to_target) {
  auto& from = to_target ? link->client : link->target;
  from.async_read_some(asio::buffer(link->buffers[to_target]),
                       [this, link, to_target](const boost::system::error_code& error, size_t size) {
                         if (error) {
                           link->Close();
                           links_.erase(link);
                           return;
                         }
                         if (state_ == State::kDropping) {
                           link->held[to_target] = size;
                           return;
                         }
                         asio::async_write(to_target ? link->target : link->client,
                                           asio::buffer(link->buffers[to_target], size),
                                           [this, link, to_target](const boost::system::error_code& failed, size_t) {
                                             failed ? link->Close() : Pump(link, to_target);
                                           });
                       });
}

}  // namespace spl::testing
