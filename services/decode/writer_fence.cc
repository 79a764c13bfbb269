#include "services/decode/writer_fence.h"

#include <grpcpp/grpcpp.h>

#include <utility>

#include "services/base/check.h"
#include "services/base/grpc_status.h"
#include "services/base/log.h"
#include "services/base/status.h"

namespace spl::decode {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMaxStubs = 64;
// How long the writer refuses a late call with the ticket. Longer than any client waits; the writer keeps 150 bytes for
// it, and cuts the time to its own limit.
constexpr std::chrono::hours kRememberRevoked{1};

}  // namespace

WriterFence::~WriterFence() {
  std::lock_guard lock(mutex_);
  SPLICE_CHECK(stopping_ || num_asking_ == 0, "Stop() was not called");
}

TicketWriter WriterFence::Note(const v1::KvWriter& writer, std::chrono::milliseconds ttl) const {
  TicketWriter noted{.grpc_address = writer.grpc_address(), .epoch = writer.epoch(), .seen = Clock::now()};
  noted.anybody_before = noted.seen + 2 * ttl;
  if (transport_ != nullptr && !writer.channel_address().empty() &&
      transport_->ConnectionsOf(writer.channel_address(), noted.seen).known)
    noted.channel_address = writer.channel_address();
  return noted;
}

bool WriterFence::Gone(const TicketWriter& writer) const {
  if (transport_ == nullptr) return false;
  if (!writer.channel_address.empty()) return transport_->ConnectionsOf(writer.channel_address, writer.seen).all() == 0;
  return writer.grpc_address.empty() && Clock::now() >= writer.anybody_before &&
         transport_->ConnectionsOf("", writer.anybody_before).all() == 0;
}

bool WriterFence::Cut(const TicketWriter& writer) {
  if (writer.channel_address.empty() ||
      transport_->ConnectionsOf(writer.channel_address, writer.seen).over_network == 0)
    return false;
  transport_->CutWriter(writer.channel_address, writer.seen);
  return true;
}

std::shared_ptr<v1::Prefill::Stub> WriterFence::StubOfLocked(const std::string& address) {
  if (const auto known = stubs_.find(address); known != stubs_.end()) return known->second;
  if (stubs_.size() >= kMaxStubs) stubs_.clear();
  std::shared_ptr<v1::Prefill::Stub> stub = v1::Prefill::NewStub(MakePeerChannel(address, options_.tls.get()));
  stubs_.emplace(address, stub);
  return stub;
}

bool WriterFence::Ask(const TicketWriter& writer, const RandomId& ticket, std::function<void()> on_quiet) {
  struct Call {
    grpc::ClientContext context;
    v1::RevokeTicketRequest request;
    v1::RevokeTicketResponse response;
    std::shared_ptr<v1::Prefill::Stub> stub;
  };
  if (writer.grpc_address.empty()) return false;
  auto call = std::make_shared<Call>();
  {
    std::lock_guard lock(mutex_);
    if (stopping_ || num_asking_ >= options_.max_asking) return false;
    ++num_asking_;
    call->stub = StubOfLocked(writer.grpc_address);
  }
  call->request.set_ticket_id(ticket.ToBytes());
  call->request.set_epoch(writer.epoch);
  call->request.set_ttl_ms(static_cast<uint32_t>(std::chrono::milliseconds(kRememberRevoked).count()));
  call->context.set_deadline(std::chrono::system_clock::now() + options_.rpc_timeout);
  call->stub->async()->RevokeTicket(&call->context, &call->request, &call->response,
                                    [this, call, on_quiet = std::move(on_quiet)](const grpc::Status& status) {
                                      if (status.ok()) on_quiet();
                                      std::lock_guard lock(mutex_);
                                      --num_asking_;
                                      idle_.notify_all();
                                    });
  return true;
}

void WriterFence::Stop() {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  idle_.wait(lock, [&] { return num_asking_ == 0; });  // each ends by its deadline
}

}  // namespace spl::decode
