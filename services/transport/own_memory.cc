#include "services/transport/own_memory.h"

#include <cstring>
#include <mutex>
#include <shared_mutex>

#include "services/base/status.h"

namespace spl::transport {
namespace {

class OwnMemoryChannel final : public KvChannel {
 public:
  explicit OwnMemoryChannel(std::span<std::byte> memory) : memory_(memory) {}

  absl::Status Put(std::vector<PutOp> ops, std::function<void(absl::Status)> done, LeaseEnd lease_end) override {
    return Run(ops, done, [&]() -> absl::Status {
      if (std::chrono::steady_clock::now() >= lease_end) return Late();
      for (const PutOp& op : ops) std::memcpy(memory_.data() + op.remote_offset, op.local, op.bytes);
      return absl::OkStatus();
    });
  }

  std::span<std::byte> mapped_memory() const override { return memory_; }

  absl::Status PutThrough(Copier copier, std::vector<PutOp> ops, std::function<void(absl::Status)> done,
                          LeaseEnd lease_end) override {
    return Run(ops, done, [&]() -> absl::Status {
      if (std::chrono::steady_clock::now() >= lease_end) return Late();
      std::vector<MappedWrite> writes;
      for (const PutOp& op : ops) writes.push_back({memory_.data() + op.remote_offset, op.local, op.bytes});
      return copier(writes);
    });
  }

  absl::Status Get(std::vector<GetOp> ops, std::function<void(absl::Status)> done) override {
    return Run(ops, done, [&] {
      for (const GetOp& op : ops) std::memcpy(op.local, memory_.data() + op.remote_offset, op.bytes);
      return absl::OkStatus();
    });
  }

  absl::Status Flush(std::function<void(absl::Status)> done) override {
    SPLICE_RETURN_IF_ERROR(status());
    done(absl::OkStatus());
    return absl::OkStatus();
  }

  absl::Status FlushAndWait(std::chrono::nanoseconds) override { return status(); }

  // Running copies end first.
  absl::Status Close(std::chrono::nanoseconds) override {
    std::unique_lock lock(mutex_);
    closed_ = true;
    return absl::OkStatus();
  }

  std::string carrier() const override { return "memory"; }
  std::string local_address() const override { return ""; }

  absl::Status status() const override {
    std::shared_lock lock(mutex_);
    return StatusLocked();
  }

 private:
  // Needs no other end of the channel: writes of this process are over when Put returns.
  static absl::Status Late() {
    return Errorf(absl::StatusCode::kDeadlineExceeded, "the lease ended before the write began");
  }
  absl::Status StatusLocked() const {
    return closed_ ? absl::UnavailableError("the channel into the worker's own memory is closed") : absl::OkStatus();
  }

  template <typename Ops, typename Copy>
  absl::Status Run(const Ops& ops, const std::function<void(absl::Status)>& done, Copy copy) {
    absl::Status copied;
    {
      std::shared_lock lock(mutex_);  // copies of several threads run side by side; Close waits for them
      SPLICE_RETURN_IF_ERROR(StatusLocked());
      for (const auto& op : ops) {
        if (op.remote_offset > memory_.size() || op.bytes > memory_.size() - op.remote_offset)
          return InvalidArgument("{} bytes at {} are outside of the {} bytes of own memory", op.bytes, op.remote_offset,
                                 memory_.size());
      }
      copied = copy();
    }
    done(copied);
    return absl::OkStatus();
  }

  const std::span<std::byte> memory_;
  mutable std::shared_mutex mutex_;  // guards closed_
  bool closed_ = false;
};

}  // namespace

std::unique_ptr<KvChannel> MakeOwnMemoryChannel(std::span<std::byte> memory) {
  return std::make_unique<OwnMemoryChannel>(memory);
}

}  // namespace spl::transport
