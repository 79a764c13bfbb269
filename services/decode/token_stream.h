// Tokens on the way from the engine to one Stream call.
#pragma once

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <mutex>

#include "absl/status/status.h"
#include "spl/v1/decode.grpc.pb.h"

namespace spl::decode {

// Created with its ticket, so that tokens sampled before the router attaches are kept. Any thread may call. While a
// write is in flight, further tokens collect in one chunk, which the length of the sequence bounds.
class TokenStream : public std::enable_shared_from_this<TokenStream> {
 public:
  // `on_cancel` runs once, if the attached call is cancelled or its deadline passes before End.
  explicit TokenStream(std::function<void()> on_cancel) : on_cancel_(std::move(on_cancel)) {}

  void Push(const v1::StreamChunk& chunk);
  void End(const absl::Status& status);

  // Whether a call reads this stream, or has read it.
  bool has_reader();
  // Returns the reactor of the one call that reads this stream. Null: another call reads it already.
  grpc::ServerWriteReactor<v1::StreamChunk>* Attach();

 private:
  class Reactor;
  void Advance();

  std::function<void()> on_cancel_;
  std::mutex mutex_;  // guards all below
  v1::StreamChunk pending_;
  bool ended_ = false;
  absl::Status end_status_;
  Reactor* reactor_ = nullptr;  // deletes itself in OnDone
  bool attached_once_ = false;
  bool writing_ = false;
  bool finished_ = false;
};

}  // namespace spl::decode
