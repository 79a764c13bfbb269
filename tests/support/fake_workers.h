// Scripted doubles of a prefill and a decode worker: real gRPC servers that implement the two services faithfully
// (tickets, commit, streams, release) around a "model" that is a pure function, so that tests can check every token.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "services/wire/version.h"
#include "spl/v1/decode.grpc.pb.h"
#include "spl/v1/prefill.grpc.pb.h"

namespace spl::testing {

inline constexpr std::chrono::milliseconds kLongWait{20'000};  // a wait for an event that must come

// The token after `prompt` and `index` outputs of continuation `fork`. `prompt` excludes outputs.
using FakeModel = std::function<uint32_t(const std::vector<uint32_t>& prompt, uint32_t fork, uint32_t index)>;
// Repeats the prompt, each fork from another place.
uint32_t RepeatPrompt(const std::vector<uint32_t>& prompt, uint32_t fork, uint32_t index);

// What the workers of one fake cluster share: the model, and the KV that has "landed" (a prompt stands for its KV).
struct FakeFabric {
  FakeModel model = RepeatPrompt;
  uint32_t eos_id = 4091;      // the model ends with this token …
  uint32_t answer_tokens = 0;  // … after so many; 0: only max_tokens ends it
  bool answers_once = false;   // without answer_tokens: … when it has repeated the prompt

  struct Landed {
    std::vector<uint32_t> prompt;
    uint32_t num_output = 0;
  };
  std::mutex mutex;                      // guards landed
  std::map<std::string, Landed> landed;  // by ticket id

  v1::SampledToken Sample(const Landed& kv, const v1::SamplingParams& sampling, uint32_t fork, uint32_t index) const;
};

// Meaning of `auto` (ModelIdentity): all workers of a cluster say the same, and a router takes the word of the first.
struct FakeDefaultReuse {
  std::string method;
  uint32_t tokens = 0;
  std::string longer;
  void Fill(v1::ModelIdentity& identity) const {
    identity.set_default_reuse(method);
    identity.set_default_reuse_tokens(tokens);
    identity.set_default_reuse_longer(longer);
  }
};

class FakeDecode final : public v1::Decode::CallbackService {
 public:
  struct Options {
    std::string worker_id = "d0";
    uint64_t epoch = 1;
    std::string fingerprint = std::string(32, 'f');
    std::string layout_digest = std::string(32, 'l');
    uint32_t max_context = 16384;
    uint32_t vocab_size = 4096;
    uint32_t max_sequences = 256;
    uint64_t max_sequence_tokens = 0;
    bool replays = true;             // DecodeInfo.replays
    bool structured_output = false;  // DecodeInfo.structured_output
    uint32_t wire_min = wire::kVersionMin;
    uint32_t wire_max = wire::kVersionMax;
    std::string listen = "127.0.0.1:0";
    FakeDefaultReuse default_reuse;
  };

  FakeDecode(FakeFabric& fabric, Options options);
  ~FakeDecode() override;

  std::string address() const { return address_; }
  const Options& options() const { return options_; }
  // As after a SIGKILL: every call breaks, nothing answers any more.
  void Kill();

  void SetFull(bool full);
  void FailReserve(grpc::Status status, int times);
  void SetDraining(bool draining);
  grpc::ServerUnaryReactor* SetDraining(grpc::CallbackServerContext* context, const v1::SetDrainingRequest* request,
                                        v1::SetDrainingResponse* response) override;
  // Sequences stop before this output index until it is raised (counted over re-dispatches).
  void SetGate(uint32_t index);
  // Ends every open stream with this status and forgets the sequences, as a worker that has lost its device.
  void BreakStreams(grpc::Status status);

  struct Counters {
    int reserves = 0;
    int refused = 0;
    int commits = 0;
    int releases = 0;       // that named a live ticket
    int late_releases = 0;  // of tickets that were gone already
    int streams = 0;        // opened
    int stream_cancels = 0;
    int live_tickets = 0;
    bool last_writer_quiet = false;
    int quiet_releases = 0;  // that said so, of any ticket
  };
  Counters counters();
  v1::ReserveRequest last_reserve();
  // Waits until the predicate holds; false after kLongWait.
  bool WaitFor(const std::function<bool(const Counters&)>& done);
  bool WaitIdle() {
    return WaitFor([](const Counters& c) { return c.live_tickets == 0; });
  }

 private:
  class StreamReactor;
  struct Sequence;

  grpc::ServerUnaryReactor* GetInfo(grpc::CallbackServerContext*, const v1::GetDecodeInfoRequest*,
                                    v1::DecodeInfo*) override;
  grpc::ServerUnaryReactor* Reserve(grpc::CallbackServerContext*, const v1::ReserveRequest*, v1::Ticket*) override;
  grpc::ServerUnaryReactor* Commit(grpc::CallbackServerContext*, const v1::CommitRequest*,
                                   v1::CommitResponse*) override;
  grpc::ServerUnaryReactor* Release(grpc::CallbackServerContext*, const v1::ReleaseRequest*,
                                    v1::ReleaseResponse*) override;
  grpc::ServerWriteReactor<v1::StreamChunk>* Stream(grpc::CallbackServerContext*, const v1::StreamRequest*) override;

  void RunEngine();
  bool StepLocked(Sequence& sequence);
  void EraseLocked(const std::string& ticket_id);
  void OnStreamCancelled(const std::string& ticket_id);

  FakeFabric& fabric_;
  const Options options_;
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::map<std::string, std::shared_ptr<Sequence>> sequences_;
  Counters counters_;
  v1::ReserveRequest last_reserve_;
  bool full_ = false;
  bool draining_ = false;
  bool stopping_ = false;
  uint32_t gate_ = UINT32_MAX;
  grpc::Status reserve_status_;
  int reserve_failures_ = 0;
  uint64_t next_ticket_ = 1;
  std::thread engine_;
};

class FakePrefill final : public v1::Prefill::CallbackService {
 public:
  struct Options {
    std::string worker_id = "p0";
    uint64_t epoch = 1;
    std::string fingerprint = std::string(32, 'f');
    std::string layout_digest = std::string(32, 'l');
    uint32_t max_context = 16384;
    uint32_t vocab_size = 4096;
    uint64_t max_prompt_tokens = 0;
    uint64_t queued_tokens = 0;  // that it claims; it does 10,000 a second
    std::string listen = "127.0.0.1:0";
    std::string store;               // chunk stores that Publish puts into; empty: it only counts
    bool structured_output = false;  // PrefillInfo.structured_output
    FakeDefaultReuse default_reuse;
  };

  FakePrefill(FakeFabric& fabric, Options options);
  ~FakePrefill() override;

  std::string address() const { return address_; }
  void Kill();

  // Runs wait after they have started until Hold(false).
  void Hold(bool hold);
  void FailRuns(grpc::Status status, int times);
  // Why later prompts got their method: Receipt.choice.
  void SetChoice(const v1::ChoiceReceipt& choice);
  // As a worker of an earlier version does.
  void IgnorePromptLogprobs() { ignores_prompt_logprobs_ = true; }
  // Answers to RevokeTicket; the ticket is revoked either way.
  void FailRevokes(grpc::Status status);
  // The same for publishes.
  void HoldPublishes(bool hold);
  void FailPublishes(grpc::Status status, int times);
  std::vector<v1::PublishRequest> publishes();  // that were begun, in order

  struct Counters {
    int publishes = 0;  // begun
    int publishes_cancelled = 0;
    int connects = 0;
    int runs = 0;
    int revokes = 0;
    int late_runs = 0;  // of revoked tickets, refused
    int cancels = 0;
    int waiting = 0;
  };
  Counters counters();
  v1::PrefillRequest last_run();
  v1::RevokeTicketRequest last_revoke();
  bool WaitFor(const std::function<bool(const Counters&)>& done);

 private:
  class RunReactor;
  class PublishReactor;

  grpc::ServerUnaryReactor* Publish(grpc::CallbackServerContext*, const v1::PublishRequest*,
                                    v1::PublishResponse*) override;
  grpc::Status Store(const v1::PublishRequest& request, v1::PublishResponse* response);
  grpc::ServerUnaryReactor* GetInfo(grpc::CallbackServerContext*, const v1::GetPrefillInfoRequest*,
                                    v1::PrefillInfo*) override;
  grpc::ServerUnaryReactor* ConnectPeer(grpc::CallbackServerContext*, const v1::ConnectPeerRequest*,
                                        v1::ConnectPeerResponse*) override;
  grpc::ServerUnaryReactor* Run(grpc::CallbackServerContext*, const v1::PrefillRequest*, v1::PrefillResponse*) override;
  grpc::ServerUnaryReactor* RevokeTicket(grpc::CallbackServerContext*, const v1::RevokeTicketRequest*,
                                         v1::RevokeTicketResponse*) override;

  void RunEngine();
  grpc::Status Compute(const v1::PrefillRequest& request, v1::PrefillResponse* response);

  FakeFabric& fabric_;
  const Options options_;
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<std::shared_ptr<RunReactor>> queue_;
  std::map<std::string, std::shared_ptr<v1::Decode::Stub>> peers_;
  Counters counters_;
  v1::PrefillRequest last_run_;
  bool hold_ = false;
  bool stopping_ = false;
  grpc::Status run_status_;
  int run_failures_ = 0;
  std::optional<v1::ChoiceReceipt> choice_;
  std::atomic<bool> ignores_prompt_logprobs_{false};
  grpc::Status revoke_status_;
  v1::RevokeTicketRequest last_revoke_;
  std::set<std::string> revoked_;
  bool hold_publishes_ = false;
  grpc::Status publish_status_;
  int publish_failures_ = 0;
  std::vector<v1::PublishRequest> publishes_;
  std::vector<std::thread> publishers_;  // one a call
  std::thread engine_;
};

}  // namespace spl::testing
