// The fleet's state of each member, and of each pair of members. Only the fleet's strand touches it.
#pragma once

#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "services/router/fleet/clock_offset.h"
#include "services/router/fleet/snapshot.h"
#include "services/router/fleet/workers.h"

namespace spl::router {

// One member's address.
template <typename Worker, typename Info>
struct Slot {
  std::string address;
  // False: no longer a member. It gets nothing new, and is polled as long as it answers and has work, so that its
  // running requests finish, or are moved when it dies.
  bool listed = true;
  std::shared_ptr<Worker> worker;
  std::shared_ptr<PrefillWorker> local_prefill;  // for a decode worker that prefills, once it has reported it
  std::unique_ptr<boost::asio::steady_timer> timer;
  bool alive = false;
  bool suspect = false;                            // alive by the last poll, but a call has failed since
  bool silent = false;                             // its last poll was not answered in time
  bool watched = false;                            // for workers that prefill: a watch of the cache is open
  uint64_t unwatchable_epoch = 0;                  // epoch of an older program, which lacks the call
  bool polling = false;                            // a poll is running; otherwise the timer runs
  std::chrono::steady_clock::time_point answered;  // when the last poll that it answered was sent
  int unanswered = 0;                              // polls in a row while not alive
  ClockEstimate clock;
  Info info;
  std::string version;  // ProgramVersionIn its last answer
  bool mismatch_logged = false;
};
using PrefillSlot = Slot<PrefillWorker, v1::PrefillInfo>;
using DecodeSlot = Slot<DecodeWorker, v1::DecodeInfo>;

// A wanted connection between one life of a prefill worker and one life of a decode worker.
struct Connection {
  uint64_t prefill_epoch = 0;
  uint64_t decode_epoch = 0;
  bool ready = false;
  bool connecting = false;
  std::chrono::steady_clock::time_point ready_since;
  std::chrono::steady_clock::time_point retry_at;
  PeerLink link;
};

}  // namespace spl::router
