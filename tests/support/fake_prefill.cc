#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/kv_copy/crc32c.h"
#include "services/base/grpc_status.h"
#include "services/chunk/remote/cluster_chunk_store.h"
#include "tests/support/fake_workers.h"

namespace spl::testing {

class FakePrefill::RunReactor final : public grpc::ServerUnaryReactor {
 public:
  RunReactor(FakePrefill& worker, const v1::PrefillRequest* request, v1::PrefillResponse* response)
      : worker_(worker), request_(*request), response_(response) {}

  // The response lives until Finish: it is filled under the same lock that decides who finishes.
  void End(grpc::Status status, v1::PrefillResponse* response = nullptr) {
    {
      std::lock_guard lock(mutex_);
      if (ended_) return;
      ended_ = true;
      if (response != nullptr) response_->Swap(response);
    }
    Finish(std::move(status));
  }

  std::shared_ptr<RunReactor> self;
  FakePrefill& worker_;
  const v1::PrefillRequest request_;
  v1::PrefillResponse* const response_;

 private:
  void OnCancel() override {
    {
      std::lock_guard lock(worker_.mutex_);
      ++worker_.counters_.cancels;
      std::erase_if(worker_.queue_, [this](const auto& r) { return r.get() == this; });
      worker_.counters_.waiting = static_cast<int>(worker_.queue_.size());
    }
    worker_.changed_.notify_all();
    End(grpc::Status::CANCELLED);
  }
  void OnDone() override { const std::shared_ptr<RunReactor> keep = std::move(self); }

  std::mutex mutex_;
  bool ended_ = false;
};

// Ends once, by its answer or by a client that cancels.
class FakePrefill::PublishReactor final : public grpc::ServerUnaryReactor {
 public:
  explicit PublishReactor(FakePrefill& worker) : worker_(worker) {}
  bool ended() {
    std::lock_guard lock(mutex_);
    return ended_;
  }
  void End(grpc::Status status, v1::PublishResponse* from = nullptr, v1::PublishResponse* to = nullptr) {
    {
      std::lock_guard lock(mutex_);
      if (ended_) return;
      ended_ = true;
      if (from != nullptr) to->Swap(from);
    }
    Finish(std::move(status));
  }
  std::shared_ptr<PublishReactor> self;

 private:
  void OnCancel() override {
    {
      std::lock_guard lock(worker_.mutex_);
      ++worker_.counters_.publishes_cancelled;
    }
    End(grpc::Status::CANCELLED);
    worker_.changed_.notify_all();
  }
  void OnDone() override { const std::shared_ptr<PublishReactor> keep = std::move(self); }

  FakePrefill& worker_;
  std::mutex mutex_;
  bool ended_ = false;
};

FakePrefill::FakePrefill(FakeFabric& fabric, Options options) : fabric_(fabric), options_(std::move(options)) {
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddListeningPort(options_.listen, grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
  address_ = "127.0.0.1:" + std::to_string(port);
  engine_ = std::thread([this] { RunEngine(); });
}

FakePrefill::~FakePrefill() { Kill(); }

void FakePrefill::Kill() {
  std::deque<std::shared_ptr<RunReactor>> waiting;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    waiting.swap(queue_);
  }
  changed_.notify_all();
  for (const auto& reactor : waiting) reactor->End(grpc::Status(grpc::StatusCode::UNAVAILABLE, "killed"));
  if (server_ != nullptr) {
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
  }
  if (engine_.joinable()) engine_.join();
  for (std::thread& publisher : publishers_) publisher.join();
  publishers_.clear();
}

void FakePrefill::Hold(bool hold) {
  {
    std::lock_guard lock(mutex_);
    hold_ = hold;
  }
  changed_.notify_all();
}

void FakePrefill::FailRuns(grpc::Status status, int times) {
  std::lock_guard lock(mutex_);
  run_status_ = std::move(status);
  run_failures_ = times;
}

void FakePrefill::FailRevokes(grpc::Status status) {
  std::lock_guard lock(mutex_);
  revoke_status_ = std::move(status);
}

void FakePrefill::HoldPublishes(bool hold) {
  {
    std::lock_guard lock(mutex_);
    hold_publishes_ = hold;
  }
  changed_.notify_all();
}

void FakePrefill::FailPublishes(grpc::Status status, int times) {
  std::lock_guard lock(mutex_);
  publish_status_ = std::move(status);
  publish_failures_ = times;
}

std::vector<v1::PublishRequest> FakePrefill::publishes() {
  std::lock_guard lock(mutex_);
  return publishes_;
}

grpc::ServerUnaryReactor* FakePrefill::Publish(grpc::CallbackServerContext*, const v1::PublishRequest* request,
                                               v1::PublishResponse* response) {
  const auto reactor = std::make_shared<PublishReactor>(*this);
  reactor->self = reactor;
  std::lock_guard lock(mutex_);
  ++counters_.publishes;
  publishes_.push_back(*request);
  changed_.notify_all();
  publishers_.emplace_back([this, reactor, request = *request, response] {
    grpc::Status status;
    bool fails = false;
    {
      std::unique_lock wait(mutex_);
      changed_.wait(wait, [&] { return stopping_ || !hold_publishes_ || reactor->ended(); });
      fails = stopping_ || publish_failures_ > 0;
      status = stopping_ ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "killed") : publish_status_;
      if (publish_failures_ > 0) --publish_failures_;
    }
    v1::PublishResponse answer;
    if (!fails && !reactor->ended()) status = Store(request, &answer);
    reactor->End(status, &answer, response);
  });
  return reactor.get();
}

// A chunk of a few bytes a token for every 64 tokens of every segment, under the keys that the engine would use.
grpc::Status FakePrefill::Store(const v1::PublishRequest& request, v1::PublishResponse* response) {
  std::vector<chunk::Chunk> chunks;
  for (const v1::TokenSegment& segment : request.segments()) {
    chunk::ChunkKey previous;
    for (uint32_t begin = segment.begin(); begin < segment.end(); begin += chunk::kChunkTokens) {
      const uint32_t end = std::min<uint32_t>(segment.end(), begin + chunk::kChunkTokens);
      const std::vector<int32_t> tokens(request.token_ids().begin() + begin, request.token_ids().begin() + end);
      chunk::Chunk chunk;
      chunk::ChunkHeader& header = chunk.header;
      std::memcpy(header.model_fingerprint.data(), options_.fingerprint.data(), 32);
      std::memcpy(header.layout_digest.data(), options_.layout_digest.data(), 32);
      std::memcpy(header.namespace_id.data(), segment.namespace_key().data(), 32);
      header.key = chunk::MakeChunkKey(chunk::ChainKind::kSegment, header.model_fingerprint, header.namespace_id,
                                       begin == segment.begin() ? nullptr : &previous, tokens);
      previous = header.key;
      header.num_tokens = end - begin;
      header.first_position = begin;
      header.provenance = chunk::Provenance::kExact;
      chunk.payload.resize(16 * tokens.size(), std::byte{7});
      header.payload_bytes = chunk.payload.size();
      header.payload_crc32c = kernels::Crc32cExtend(0, chunk.payload.data(), chunk.payload.size());
      response->set_bytes(response->bytes() + header.payload_bytes);
      chunks.push_back(std::move(chunk));
    }
  }
  response->set_chunks(chunks.size());
  response->set_computed_tokens(static_cast<uint64_t>(request.token_ids_size()));
  response->set_prefill_seconds(0.25);
  if (options_.store.empty()) return grpc::Status::OK;
  const auto store = chunk::ClusterChunkStore::Connect(options_.store, {}, {});
  if (!store.ok()) return ToGrpcStatus(store.status());
  const chunk::PutOptions options{.durable = request.durable(), .pin = static_cast<chunk::Pin>(request.pin())};
  return ToGrpcStatus(
      (*store)
          ->PutWith(chunk::PointersTo(chunks), options, std::chrono::steady_clock::now() + std::chrono::seconds(10))
          .status());
}

FakePrefill::Counters FakePrefill::counters() {
  std::lock_guard lock(mutex_);
  return counters_;
}

v1::PrefillRequest FakePrefill::last_run() {
  std::lock_guard lock(mutex_);
  return last_run_;
}

v1::RevokeTicketRequest FakePrefill::last_revoke() {
  std::lock_guard lock(mutex_);
  return last_revoke_;
}

bool FakePrefill::WaitFor(const std::function<bool(const Counters&)>& done) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, kLongWait, [&] { return done(counters_); });
}

grpc::ServerUnaryReactor* FakePrefill::GetInfo(grpc::CallbackServerContext* context, const v1::GetPrefillInfoRequest*,
                                               v1::PrefillInfo* info) {
  context->AddInitialMetadata(wire::kProgramVersionKey, "9.8.7 (fake)");
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
  *info->mutable_wire() = wire::OwnVersions();
  info->set_prefill_tokens_per_s(10'000);
  info->set_queued_tokens(options_.queued_tokens);
  info->set_max_prompt_tokens(options_.max_prompt_tokens);
  info->set_structured_output(options_.structured_output);
  for (const auto& [id, stub] : peers_) info->add_connected_peers(id);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  // A process that is gone answers no poll while its calls break off.
  reactor->Finish(stopping_ ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "killed") : grpc::Status::OK);
  return reactor;
}

grpc::ServerUnaryReactor* FakePrefill::ConnectPeer(grpc::CallbackServerContext* context,
                                                   const v1::ConnectPeerRequest* request,
                                                   v1::ConnectPeerResponse* response) {
  {
    std::lock_guard lock(mutex_);
    ++counters_.connects;
    peers_[request->endpoint().worker_id()] = v1::Decode::NewStub(
        grpc::CreateChannel(request->endpoint().grpc_address(), grpc::InsecureChannelCredentials()));
  }
  changed_.notify_all();
  response->set_transport("shm");
  response->set_bytes_per_s(5e9);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

grpc::ServerUnaryReactor* FakePrefill::Run(grpc::CallbackServerContext*, const v1::PrefillRequest* request,
                                           v1::PrefillResponse* response) {
  auto reactor = std::make_shared<RunReactor>(*this, request, response);
  reactor->self = reactor;
  bool late = false;
  {
    std::lock_guard lock(mutex_);
    ++counters_.runs;
    last_run_ = *request;
    late = revoked_.contains(request->ticket().ticket_id());
    counters_.late_runs += late;
    if (!stopping_ && !late) queue_.push_back(reactor);
    counters_.waiting = static_cast<int>(queue_.size());
  }
  if (late) reactor->End(grpc::Status(grpc::StatusCode::ABORTED, "the ticket was revoked"));
  changed_.notify_all();
  return reactor.get();
}

// It commits before it answers and does nothing else to the pages: a cancelled call writes nothing.
grpc::ServerUnaryReactor* FakePrefill::RevokeTicket(grpc::CallbackServerContext* context,
                                                    const v1::RevokeTicketRequest* request, v1::RevokeTicketResponse*) {
  grpc::Status status;
  {
    std::lock_guard lock(mutex_);
    ++counters_.revokes;
    last_revoke_ = *request;
    revoked_.insert(request->ticket_id());
    status = revoke_status_;
  }
  changed_.notify_all();
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(status);
  return reactor;
}

void FakePrefill::RunEngine() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || (!hold_ && !queue_.empty()); });
    if (stopping_) return;
    const std::shared_ptr<RunReactor> reactor = queue_.front();
    queue_.pop_front();
    counters_.waiting = static_cast<int>(queue_.size());
    grpc::Status status;
    const bool fails = run_failures_ > 0;
    if (fails) {
      --run_failures_;
      status = run_status_;
    }
    lock.unlock();
    v1::PrefillResponse response;
    if (!fails) status = Compute(reactor->request_, &response);
    reactor->End(status, &response);
    lock.lock();
    changed_.notify_all();
  }
}

void FakePrefill::SetChoice(const v1::ChoiceReceipt& choice) {
  std::lock_guard lock(mutex_);
  choice_ = choice;
}

grpc::Status FakePrefill::Compute(const v1::PrefillRequest& request, v1::PrefillResponse* response) {
  FakeFabric::Landed kv;
  const int num_output = static_cast<int>(request.num_output_tokens());
  kv.prompt.assign(request.token_ids().begin(), request.token_ids().end() - num_output);
  kv.num_output = request.num_output_tokens();
  const uint32_t forks = std::max(request.sampling().n(), 1U);
  for (uint32_t fork = 0; fork < forks; ++fork) {
    *response->add_first_tokens() = fabric_.Sample(kv, request.sampling(), fork, kv.num_output);
  }
  // Token i of the prompt has -i, and alternative j of it -j.
  const bool scores = request.has_prompt_logprobs() && !ignores_prompt_logprobs_;
  for (int i = 1; scores && i < request.token_ids_size(); ++i) {
    v1::PromptLogprobs& logprobs = *response->mutable_prompt_logprobs();
    logprobs.set_num_top(request.prompt_logprobs());
    logprobs.add_logprobs(static_cast<float>(-i));
    for (uint32_t j = 0; j < request.prompt_logprobs(); ++j) {
      logprobs.add_top_ids(j + 1);
      logprobs.add_top_logprobs(-static_cast<float>(j));
    }
  }
  v1::Receipt* receipt = response->mutable_receipt();
  receipt->set_reuse_policy("exact");
  receipt->set_decode_selector("dense");
  receipt->set_exact(true);
  receipt->set_prompt_tokens(static_cast<uint32_t>(request.token_ids_size()));
  receipt->set_cached_tokens(64);
  receipt->set_bytes_moved(4096);
  receipt->set_transport("shm");
  {
    std::lock_guard lock(fabric_.mutex);
    fabric_.landed[request.ticket().ticket_id()] = kv;
  }
  std::shared_ptr<v1::Decode::Stub> peer;
  {
    std::lock_guard lock(mutex_);
    if (choice_.has_value()) *receipt->mutable_choice() = *choice_;
    const auto it = peers_.find(request.ticket().worker_id());
    if (it == peers_.end())
      return {grpc::StatusCode::FAILED_PRECONDITION, "not connected to " + request.ticket().worker_id()};
    peer = it->second;
  }
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
  v1::CommitRequest commit;
  commit.set_ticket_id(request.ticket().ticket_id());
  commit.set_generation(request.ticket().generation());
  commit.set_num_tokens(static_cast<uint32_t>(request.token_ids_size()));
  *commit.mutable_first_tokens() = response->first_tokens();
  v1::CommitResponse committed;
  return peer->Commit(&context, commit, &committed);
}

}  // namespace spl::testing
