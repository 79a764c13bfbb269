// Measures how fast a chunk store answers, so that a prompt can choose between fetching and computing.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>

#include "services/base/clock.h"

namespace spl::engine {

// Model of a fetch: seconds = latency + bytes / rate. The two are measured apart, because a short prompt pays the first
// and a long one the second. One meter for all members of a store: they are read in parallel, and every prompt is
// spread over all of them. Any thread.
class LinkMeter {
 public:
  struct Estimate {
    double latency_s = 0;    // until the first chunk, without its bytes
    double bytes_per_s = 0;  // 0: not measured yet
    double found_share = 1;  // share of the tokens that were asked for lately; 1 before anything was
  };

  explicit LinkMeter(const Clock& clock = Clock::Real()) : clock_(clock), measured_(clock.Now()) {}

  // Time to fetch `bytes` behind what others still expect. Nullopt: nothing was measured yet.
  std::optional<double> SecondsFor(int64_t bytes) const;
  Estimate estimate() const;
  // The store was asked for so many tokens, and had some of them.
  void NoteFound(int64_t asked, int64_t found);
  // Whether the last measurement is at least this old. Once per `age`: the caller then measures.
  bool TakeProbe(std::chrono::nanoseconds age);

  // Bytes that somebody is about to fetch, as long as it lives.
  class Expected {
   public:
    Expected(LinkMeter& meter, int64_t bytes);
    ~Expected();
    Expected(const Expected&) = delete;
    Expected& operator=(const Expected&) = delete;

   private:
    LinkMeter& meter_;
    const int64_t bytes_;
  };

  // One call to the store, from its construction to Ended. One thread at a time.
  class Call {
   public:
    explicit Call(LinkMeter& meter) : meter_(meter), start_(meter.clock_.Now()) {}
    void Arrived(int64_t bytes);
    enum class End : uint8_t { kComplete, kUnwanted, kTimeOver };
    void Ended(End how);

   private:
    LinkMeter& meter_;
    const SteadyTime start_;
    int num_chunks_ = 0;
    int64_t bytes_ = 0;
    SteadyTime first_{};          // when the first chunk arrived
    int64_t first_bytes_ = 0;     // the first chunk's
    int64_t total_at_first_ = 0;  // total_bytes_ of the meter then
  };

 private:
  // These hold mutex_.
  void NoteRate(double bytes_per_s);
  void NoteLatency(double seconds);

  const Clock& clock_;
  mutable std::mutex mutex_;  // guards all below
  int64_t total_bytes_ = 0;   // arrived, of all calls: those that run side by side share the link
  int64_t expected_bytes_ = 0;
  double bytes_per_s_ = 0;
  std::optional<double> latency_s_;
  double found_share_ = 1;
  SteadyTime measured_;
};

}  // namespace spl::engine
