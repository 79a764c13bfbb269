// Delivers the tokens of a decode engine to its callers on a thread of its own, so that no step waits for them.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "services/engine/runtime/decode_request.h"

namespace spl::engine {

// Callbacks of one request, see DecodeRequest.
struct DecodeListener {
  std::function<void(std::span<const DecodeToken>)> on_tokens;
  std::function<void(absl::Status)> on_done;
};

// Owns one thread, which runs all callbacks in the order in which their events were added. The engine thread adds
// events and hands them over once a step: one lock, one wake-up, and no allocation in the long run. A slow callback
// delays the ones behind it. It delays the engine only when more than `max_undelivered` tokens and other events wait.
class TokenDelivery {
 public:
  explicit TokenDelivery(size_t max_undelivered);
  ~TokenDelivery();  // Stop()

  // Engine thread. A listener must live until AddEnd takes it over. Consecutive tokens of one listener are delivered in
  // one call.
  void AddToken(DecodeListener& to, DecodeToken token);
  void AddEnd(std::unique_ptr<DecodeListener> of, const absl::Status& status);  // the last event of a listener
  // Hands over the events that were added since the last call. Does not block.
  void Flush();
  // Blocks while more than max_undelivered events are undelivered.
  void WaitForRoom() { WaitUntilAtMost(max_undelivered_); }
  // Blocks until everything that was handed over is delivered.
  void WaitForAll() { WaitUntilAtMost(0); }

  // Delivers everything that was handed over and joins the thread. Idempotent. Not from a callback.
  void Stop();

 private:
  struct End {
    std::unique_ptr<DecodeListener> owner;
    absl::Status status;
  };
  struct Event {
    DecodeListener* to;
    std::variant<size_t, End> what;  // size_t: that many of the tokens
  };
  struct Events {
    std::vector<Event> events;
    std::vector<DecodeToken> tokens;  // tokens of the events, in their order
    size_t size() const { return events.size() + tokens.size(); }
    void Clear();
    void Append(Events& others);
  };

  void RunLoop();
  void WaitUntilAtMost(size_t undelivered);
  static void Deliver(Events& events);

  const size_t max_undelivered_;
  Events filling_;  // engine thread

  std::mutex mutex_;  // guards all up to the next blank line
  std::condition_variable handed_over_, delivered_;
  Events handed_;
  size_t undelivered_ = 0;  // in handed_ and delivering_
  bool stopping_ = false;

  Events delivering_;  // delivery thread
  std::thread thread_;
};

}  // namespace spl::engine
