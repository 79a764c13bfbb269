// Brings the tokens of a decode engine to those who asked for them, on a thread of its own: no step waits for that.
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

// Where the answer to one request goes: the callbacks of DecodeRequest.
struct DecodeListener {
  std::function<void(const HeadRestoreReport&)> on_restore;  // may be null
  std::function<void(std::span<const DecodeToken>)> on_tokens;
  std::function<void(absl::Status)> on_done;
};

// Owns one thread, which runs all callbacks in the order in which their causes were added. The engine thread adds them
// and hands them over once a step: one lock and one wake, and in the long run no allocation. A callback that takes long
// holds up the ones behind it, and the engine only once more than `max_undelivered` tokens and other events wait.
class TokenDelivery {
 public:
  explicit TokenDelivery(size_t max_undelivered);
  ~TokenDelivery();  // Stop()

  // Engine thread. A listener that is added to outlives the call of Ended. Tokens of one listener that are added one
  // behind the other come in one call.
  void AddToken(DecodeListener& to, DecodeToken token);
  void AddRestores(DecodeListener& to, const HeadRestoreReport& report);
  void AddEnd(std::unique_ptr<DecodeListener> of, const absl::Status& status);  // the last one of a listener
  // Hands over what was added since; does not block.
  void Flush();
  // Blocks while more is undelivered than may be.
  void WaitForRoom() { WaitUntilAtMost(max_undelivered_); }
  // Blocks until everything that was handed over is delivered.
  void WaitForAll() { WaitUntilAtMost(0); }

  // Delivers all that was handed over and joins the thread. Idempotent; not from a callback.
  void Stop();

 private:
  struct End {
    std::unique_ptr<DecodeListener> owner;
    absl::Status status;
  };
  struct Event {
    DecodeListener* to;
    std::variant<size_t, HeadRestoreReport, End> what;  // size_t: so many of the tokens
  };
  struct Events {
    std::vector<Event> events;
    std::vector<DecodeToken> tokens;  // of the events, one behind the other
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
  size_t undelivered_ = 0;  // of handed_ and delivering_
  bool stopping_ = false;

  Events delivering_;  // delivery thread
  std::thread thread_;
};

}  // namespace spl::engine
