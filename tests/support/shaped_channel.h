// A channel behind a line of a given rate: for measurements of links that a machine does not have.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "services/transport/kv_transport.h"

namespace spl {

// Every Put is on the line for its bytes divided by the rate, behind those before it, and then goes to `inner`, which
// writes it at its own speed: what takes longer decides. A thread of its own keeps time, to some 60 us. Reads and
// mapped memory are not served.
class ShapedChannel final : public transport::KvChannel {
 public:
  ShapedChannel(transport::KvChannel& inner, double bytes_per_s);  // `inner` outlives it
  ~ShapedChannel() override;

  absl::Status Put(std::vector<transport::PutOp> ops, std::function<void(absl::Status)> done,
                   transport::LeaseEnd lease_end = transport::kNoLease) override;
  std::span<std::byte> mapped_memory() const override { return {}; }
  absl::Status PutThrough(transport::Copier, std::vector<transport::PutOp>, std::function<void(absl::Status)>,
                          transport::LeaseEnd) override;
  absl::Status Get(std::vector<transport::GetOp>, std::function<void(absl::Status)>) override;
  absl::Status Flush(std::function<void(absl::Status)> done) override;
  absl::Status FlushAndWait(std::chrono::nanoseconds timeout) override;
  absl::Status Close(std::chrono::nanoseconds timeout) override;
  std::string carrier() const override { return "shaped " + inner_.carrier(); }
  std::string local_address() const override { return inner_.local_address(); }
  absl::Status status() const override { return inner_.status(); }

 private:
  struct Write {
    std::vector<transport::PutOp> ops;
    std::function<void(absl::Status)> done;
    transport::LeaseEnd lease_end;
    std::chrono::steady_clock::time_point off_the_line;
  };
  void Loop();
  bool WaitUntilSent(std::chrono::steady_clock::time_point deadline);

  transport::KvChannel& inner_;
  const double bytes_per_s_;
  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<Write> line_;
  std::chrono::steady_clock::time_point line_free_;
  bool busy_ = false;  // a write is being handed over
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace spl
