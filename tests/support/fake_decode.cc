#include <algorithm>
#include <utility>

#include "tests/support/fake_workers.h"

namespace spl::testing {

uint32_t RepeatPrompt(const std::vector<uint32_t>& prompt, uint32_t fork, uint32_t index) {
  return prompt[(index + fork) % prompt.size()];
}

v1::SampledToken FakeFabric::Sample(const Landed& kv, const v1::SamplingParams& sampling, uint32_t fork,
                                    uint32_t index) const {
  v1::SampledToken token;
  const auto once = answers_once ? static_cast<uint32_t>(kv.prompt.size()) : 0;
  const uint32_t end = answer_tokens > 0 ? answer_tokens : once;
  if (end > 0 && index >= end && !sampling.ignore_eos()) {
    token.set_token_id(eos_id);
    token.set_finish_reason(v1::FINISH_REASON_STOP);
  } else {
    token.set_token_id(model(kv.prompt, fork, index));
    if (sampling.has_max_tokens() && index + 1 >= sampling.max_tokens()) {
      token.set_finish_reason(v1::FINISH_REASON_LENGTH);
    }
  }
  if (sampling.has_logprobs()) {
    token.mutable_logprob()->set_logprob(-0.25F);
    for (uint32_t k = 0; k < sampling.logprobs(); ++k) {
      auto* top = token.mutable_logprob()->add_top();
      top->set_token_id(token.token_id() + k < 4000 ? token.token_id() + k : k);
      top->set_logprob(-0.25F - static_cast<float>(k));
    }
  }
  return token;
}

// Writes what the engine produces; cancellation goes back to the worker.
class FakeDecode::StreamReactor final : public grpc::ServerWriteReactor<v1::StreamChunk> {
 public:
  StreamReactor(FakeDecode& worker, std::string ticket_id) : worker_(worker), ticket_id_(std::move(ticket_id)) {}

  void Send(v1::StreamChunk chunk) {
    std::lock_guard lock(mutex_);
    pending_.push_back(std::move(chunk));
    AdvanceLocked();
  }
  void End(grpc::Status status) {
    std::lock_guard lock(mutex_);
    if (ended_) return;
    ended_ = true;
    status_ = std::move(status);
    if (!status_.ok() && !writing_) pending_.clear();
    AdvanceLocked();
  }

  std::shared_ptr<StreamReactor> self;

 private:
  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    writing_ = false;
    pending_.pop_front();
    if (!ok) pending_.clear();
    AdvanceLocked();
  }
  void OnCancel() override {
    worker_.OnStreamCancelled(ticket_id_);
    End(grpc::Status::CANCELLED);
  }
  void OnDone() override { const std::shared_ptr<StreamReactor> keep = std::move(self); }
  void AdvanceLocked() {
    if (writing_ || finished_) return;
    if (!pending_.empty()) {
      writing_ = true;
      StartWrite(&pending_.front());
    } else if (ended_) {
      finished_ = true;
      Finish(status_);
    }
  }

  FakeDecode& worker_;
  const std::string ticket_id_;
  std::mutex mutex_;
  std::deque<v1::StreamChunk> pending_;
  grpc::Status status_;
  bool writing_ = false;
  bool ended_ = false;
  bool finished_ = false;
};

struct FakeDecode::Sequence {
  v1::ReserveRequest request;
  bool committed = false;
  FakeFabric::Landed kv;
  std::vector<bool> finished;
  uint32_t next_index = 0;
  std::shared_ptr<StreamReactor> stream;
};

FakeDecode::FakeDecode(FakeFabric& fabric, Options options) : fabric_(fabric), options_(std::move(options)) {
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddListeningPort(options_.listen, grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
  address_ = "127.0.0.1:" + std::to_string(port);
  engine_ = std::thread([this] { RunEngine(); });
}

FakeDecode::~FakeDecode() { Kill(); }

void FakeDecode::Kill() {
  BreakStreams(grpc::Status(grpc::StatusCode::UNAVAILABLE, "killed"));
  if (server_ != nullptr) {
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
  }
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (engine_.joinable()) engine_.join();
}

void FakeDecode::SetFull(bool full) {
  std::lock_guard lock(mutex_);
  full_ = full;
}

void FakeDecode::FailReserve(grpc::Status status, int times) {
  std::lock_guard lock(mutex_);
  reserve_status_ = std::move(status);
  reserve_failures_ = times;
}

grpc::ServerUnaryReactor* FakeDecode::SetDraining(grpc::CallbackServerContext* context,
                                                  const v1::SetDrainingRequest* request, v1::SetDrainingResponse*) {
  SetDraining(request->draining());
  auto* reactor = context->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

void FakeDecode::SetDraining(bool draining) {
  std::lock_guard lock(mutex_);
  draining_ = draining;
}

void FakeDecode::SetGate(uint32_t index) {
  {
    std::lock_guard lock(mutex_);
    gate_ = index;
  }
  changed_.notify_all();
}

void FakeDecode::BreakStreams(grpc::Status status) {
  std::lock_guard lock(mutex_);
  for (auto& [id, sequence] : sequences_) {
    if (sequence->stream != nullptr) sequence->stream->End(status);
  }
  sequences_.clear();
  counters_.live_tickets = 0;
  changed_.notify_all();
}

FakeDecode::Counters FakeDecode::counters() {
  std::lock_guard lock(mutex_);
  return counters_;
}

v1::ReserveRequest FakeDecode::last_reserve() {
  std::lock_guard lock(mutex_);
  return last_reserve_;
}

bool FakeDecode::WaitFor(const std::function<bool(const Counters&)>& done) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, kLongWait, [&] { return done(counters_); });
}

grpc::ServerUnaryReactor* FakeDecode::GetInfo(grpc::CallbackServerContext* context, const v1::GetDecodeInfoRequest*,
                                              v1::DecodeInfo* info) {
  std::lock_guard lock(mutex_);
  info->set_worker_id(options_.worker_id);
  info->set_epoch(options_.epoch);
  info->mutable_model()->set_name("fake");
  options_.default_reuse.Fill(*info->mutable_model());
  info->mutable_model()->set_fingerprint(options_.fingerprint);
  info->mutable_model()->set_layout_digest(options_.layout_digest);
  info->mutable_model()->set_max_context(options_.max_context);
  info->mutable_model()->set_vocab_size(options_.vocab_size);
  info->mutable_model()->set_weights("fp8-e4m3-block");
  info->mutable_model()->set_kv_dtype("bf16");
  info->mutable_model()->set_fp8_activation_rows(192);
  info->mutable_endpoint()->set_worker_id(options_.worker_id);
  info->mutable_endpoint()->set_epoch(options_.epoch);
  info->mutable_endpoint()->set_grpc_address(address_);
  info->set_running_sequences(static_cast<uint32_t>(sequences_.size()));
  info->set_max_sequences(options_.max_sequences);
  info->set_max_sequence_tokens(options_.max_sequence_tokens);
  info->mutable_wire()->set_min(options_.wire_min);
  info->mutable_wire()->set_max(options_.wire_max);
  info->set_draining(draining_);
  info->set_replays(options_.replays);
  info->set_structured_output(options_.structured_output);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

grpc::ServerUnaryReactor* FakeDecode::Reserve(grpc::CallbackServerContext* context, const v1::ReserveRequest* request,
                                              v1::Ticket* ticket) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  grpc::Status status;
  {
    std::lock_guard lock(mutex_);
    last_reserve_ = *request;
    const bool no_room = full_ || sequences_.size() >= options_.max_sequences;
    if (reserve_failures_ > 0) {
      --reserve_failures_;
      ++counters_.refused;
      status = reserve_status_;
    } else if (no_room) {
      ++counters_.refused;
      status = grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "no batch place is free");
    } else {
      ++counters_.reserves;
      const std::string id = options_.worker_id + "-ticket-" + std::to_string(next_ticket_++);
      auto sequence = std::make_shared<Sequence>();
      sequence->request = *request;
      sequence->finished.assign(std::max(request->sampling().n(), 1U), false);
      sequences_[id] = std::move(sequence);
      counters_.live_tickets = static_cast<int>(sequences_.size());
      ticket->set_ticket_id(id);
      ticket->set_generation(7);
      ticket->set_ttl_ms(request->ttl_ms());
      ticket->set_worker_id(options_.worker_id);
      ticket->set_epoch(options_.epoch);
    }
  }
  changed_.notify_all();
  reactor->Finish(status);
  return reactor;
}

grpc::ServerUnaryReactor* FakeDecode::Commit(grpc::CallbackServerContext* context, const v1::CommitRequest* request,
                                             v1::CommitResponse*) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  grpc::Status status;
  {
    std::lock_guard lock(mutex_);
    const auto it = sequences_.find(request->ticket_id());
    if (it == sequences_.end() || request->generation() != 7) {
      status = grpc::Status(grpc::StatusCode::NOT_FOUND, "no such ticket");
    } else {
      Sequence& sequence = *it->second;
      ++counters_.commits;
      {
        std::lock_guard fabric_lock(fabric_.mutex);
        sequence.kv = fabric_.landed.at(request->ticket_id());
        fabric_.landed.erase(request->ticket_id());
      }
      const int replayed = sequence.request.replay_token_ids_size();
      sequence.next_index = sequence.kv.num_output + (replayed > 0 ? static_cast<uint32_t>(replayed) : 1);
      for (int i = 0; i < request->first_tokens_size(); ++i) {
        sequence.finished[static_cast<size_t>(i)] =
            request->first_tokens(i).finish_reason() != v1::FINISH_REASON_UNSPECIFIED;
      }
      sequence.committed = true;
    }
  }
  changed_.notify_all();
  reactor->Finish(status);
  return reactor;
}

grpc::ServerUnaryReactor* FakeDecode::Release(grpc::CallbackServerContext* context, const v1::ReleaseRequest* request,
                                              v1::ReleaseResponse*) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  {
    std::lock_guard lock(mutex_);
    const auto it = sequences_.find(request->ticket_id());
    counters_.last_writer_quiet = request->writer_quiet();
    counters_.quiet_releases += request->writer_quiet();
    if (it == sequences_.end()) {
      ++counters_.late_releases;
    } else {
      ++counters_.releases;
      if (it->second->stream != nullptr) it->second->stream->End(grpc::Status(grpc::StatusCode::CANCELLED, "released"));
      EraseLocked(request->ticket_id());
    }
  }
  changed_.notify_all();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

grpc::ServerWriteReactor<v1::StreamChunk>* FakeDecode::Stream(grpc::CallbackServerContext*,
                                                              const v1::StreamRequest* request) {
  auto reactor = std::make_shared<StreamReactor>(*this, request->ticket_id());
  reactor->self = reactor;
  {
    std::lock_guard lock(mutex_);
    const auto it = sequences_.find(request->ticket_id());
    if (it == sequences_.end()) {
      reactor->End(grpc::Status(grpc::StatusCode::NOT_FOUND, "no such ticket"));
    } else {
      it->second->stream = reactor;
      ++counters_.streams;
    }
  }
  changed_.notify_all();
  return reactor.get();
}

void FakeDecode::OnStreamCancelled(const std::string& ticket_id) {
  {
    std::lock_guard lock(mutex_);
    ++counters_.stream_cancels;
    EraseLocked(ticket_id);
  }
  changed_.notify_all();
}

void FakeDecode::EraseLocked(const std::string& ticket_id) {
  sequences_.erase(ticket_id);
  counters_.live_tickets = static_cast<int>(sequences_.size());
}

void FakeDecode::RunEngine() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    bool progress = false;
    std::vector<std::string> ids;
    for (const auto& [id, sequence] : sequences_) ids.push_back(id);
    for (const std::string& id : ids) {
      const std::shared_ptr<Sequence> sequence = sequences_[id];
      if (!sequence->committed || sequence->stream == nullptr) continue;
      progress |= StepLocked(*sequence);
      if (std::all_of(sequence->finished.begin(), sequence->finished.end(), [](bool f) { return f; })) {
        sequence->stream->End(grpc::Status::OK);
        EraseLocked(id);
        changed_.notify_all();
      }
    }
    if (!progress) changed_.wait_for(lock, std::chrono::seconds(1));
  }
}

// One token for every continuation that goes on.
bool FakeDecode::StepLocked(Sequence& sequence) {
  if (sequence.next_index >= gate_) return false;
  v1::StreamChunk chunk;
  for (uint32_t fork = 0; fork < sequence.finished.size(); ++fork) {
    if (sequence.finished[fork]) continue;
    auto* token = chunk.add_tokens();
    token->set_index(fork);
    *token->mutable_token() = fabric_.Sample(sequence.kv, sequence.request.sampling(), fork, sequence.next_index);
    sequence.finished[fork] = token->token().finish_reason() != v1::FINISH_REASON_UNSPECIFIED;
  }
  ++sequence.next_index;
  if (chunk.tokens_size() == 0) return false;
  sequence.stream->Send(std::move(chunk));
  return true;
}

}  // namespace spl::testing
