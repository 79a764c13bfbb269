// Decides whether a prompt fetches KV or computes it, and how long it waits for what it fetches.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace spl::engine {

// Use that a prompt made of KV that the chunk store has.
enum class StoreUse : uint8_t {
  kNone,     // the store was not asked, or had nothing more than the worker
  kFetched,  // all of it was fetched
  kShared,   // a part was fetched while the prompt computed the rest
  kSlower,   // not fetched: computing takes less time
  kLate,     // it was fetched, but nothing came in time
};
std::string_view NameOf(StoreUse use);

// A prompt's alternatives, in seconds.
struct FetchTimes {
  double compute_s = 0;           // computing what could be fetched
  double queue_s = 0;             // until the engine has done what is in front of the prompt: a fetch overlaps it
  std::optional<double> fetch_s;  // as far as it is known
  double found_share = 1;         // share of compute_s that the store is expected to have
};

// The longest that a prompt is held back for a store, as a share of computing what it waits for: with the answer about
// what is stored and the arrival of its bytes, twice this. It is the promise of docs/operating.md: at most 2 % slower
// than a worker without a store, however slow or wrong the store is.
inline constexpr double kHeldShare = 0.01;
// The same for copies over a link that nobody has measured, which only the first prompts of a worker meet. They would
// otherwise never have the copies, however fast the store is.
inline constexpr double kUnmeasuredShare = 0.25;
// A prompt that cannot begin without its copies waits for so many times what the fetch was expected to take.
inline constexpr double kPatience = 2;

// False: computing is faster. True when the fetch's time is unknown: it is tried, and no prompt waits for it.
bool IsWorthFetching(const FetchTimes& times);
// Longest time to wait for the store's answer about what it has. 0: it is known not to answer so fast.
double HoldForAnswer(const FetchTimes& times, double latency_s);
// The same for the bytes, and for each further wait while they are on schedule (IsOnSchedule). 0: the prompt computes
// from its start on while they arrive.
double HoldForBytes(const FetchTimes& times);
// Whether a prompt that has waited so long loses nothing by waiting on: what has arrived saves it that much computing.
bool IsOnSchedule(const FetchTimes& times, double waited_s, double saved_s);
// The same for copies of segments, which the prompt needs before it begins: never longer than computing takes. All that
// exceeds kHeldShare is in proportion to found_share: an answer that there is nothing takes its time, too.
double HoldForCopies(const FetchTimes& times);
// Rows, at most `most`, that a prompt computes while it expects more to arrive within `seconds`: a larger pass would
// end after that.
int32_t RowsWhileFetching(double seconds, double rows_per_s, int32_t most);

}  // namespace spl::engine
