// One Generate call: a generation's output as a stream of messages.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "services/router/dispatch/generation.h"
#include "spl/v1/inference.grpc.pb.h"

namespace spl::router {

// Owns itself until gRPC has finished the call. Thread-safe: output comes from the generation's strand, completions and
// cancellation from gRPC's threads.
class GenerateReactor final : public grpc::ServerWriteReactor<v1::GenerateResponse>, public GenerationSink {
 public:
  static std::shared_ptr<GenerateReactor> Create(grpc::CallbackServerContext* context);

  // Text that comes in front of each continuation's. Call before Attach.
  void SetEcho(std::string text);
  // Cancels the generation if the call has already ended. Call once.
  void Attach(const std::shared_ptr<Generation>& generation);

  // GenerationSink
  bool OnOutput(std::span<const Delta> deltas, const FinalInfo* final) override;
  void OnError(const absl::Status& status) override;

 private:
  explicit GenerateReactor(grpc::CallbackServerContext* context) : context_(context) {}
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  void AddLocked(const Delta& delta);
  void AddPromptLocked(const std::vector<OutputToken>& prompt);
  void AdvanceLocked();

  static constexpr size_t kMaxPending = 64;  // messages; more pauses the generation

  grpc::CallbackServerContext* const context_;
  std::shared_ptr<GenerateReactor> self_;
  std::mutex mutex_;  // guards all below
  std::weak_ptr<Generation> generation_;
  std::string echo_;
  std::set<uint32_t> begun_;                  // continuations that had a delta
  std::deque<v1::GenerateResponse> pending_;  // the front one is being written if writing_
  bool writing_ = false;
  bool paused_ = false;
  bool cancelled_ = false;
  bool ended_ = false;     // status_ is final
  bool finished_ = false;  // Finish was called
  absl::Status status_;
};

}  // namespace spl::router
