// Named places where tests inject faults. Compiled into every build; a disarmed one costs one relaxed load.
//
//   static FaultPoint write_fault("kvstore.slab.write");           // at namespace scope in a .cc
//   if (write_fault.armed()) SPLICE_RETURN_IF_ERROR(write_fault.Hit().status);
//
// A test arms a fault with Arm. The hidden flag --fault NAME=ACTION also does, but only with SPLICE_ENABLE_FAULTS=1 in
// the environment, so that a flag alone cannot break a serving program. ACTION is one of
//   error(CODE)          Hit().status has that canonical code, e.g. error(UNAVAILABLE)
//   delay_until(EVENT)   Hit blocks until FireFaultEvent(EVENT); DeadlineExceeded after 60 s
//   delay(MS)            Hit blocks for so many milliseconds, 60,000 at most
//   drop                 Hit().drop: the caller skips the operation
//   crash                abort()
//   kill                 SIGKILL to this process: nothing is flushed, nothing runs at exit
//   corrupt              Hit().corrupt: the caller damages the bytes that it handles
// An action may end in @N: only the N-th hit (from 1) acts, all others pass.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace spl {

enum class FaultKind : uint8_t { kNone, kError, kDelayUntil, kDelay, kDrop, kCrash, kKill, kCorrupt };

struct FaultAction {
  FaultKind kind = FaultKind::kNone;
  absl::StatusCode code = absl::StatusCode::kUnavailable;  // kError
  std::string event;                                       // kDelayUntil
  uint32_t delay_ms = 0;                                   // kDelay
  uint64_t only_hit = 0;                                   // acts on this hit only; 0: on every hit
};

struct FaultOutcome {
  absl::Status status;
  bool drop = false;
  bool corrupt = false;
};

// Lives for the whole process (namespace scope or static local). Any thread may call any method.
class FaultPoint {
 public:
  explicit FaultPoint(const char* name);
  FaultPoint(const FaultPoint&) = delete;
  FaultPoint& operator=(const FaultPoint&) = delete;

  bool armed() const { return armed_->load(std::memory_order_relaxed); }
  // Counts the hit and returns the outcome of the armed action; an empty outcome if disarmed.
  FaultOutcome Hit() const { return armed() ? HitArmed() : FaultOutcome(); }

 private:
  FaultOutcome HitArmed() const;

  const std::string name_;
  std::atomic<bool>* armed_;  // entry of the process-wide table, never freed
};

// NotFound: no linked-in code has a fault point with that name.
absl::Status ArmFault(std::string_view name, FaultAction action);
void DisarmFault(std::string_view name);
void DisarmAllFaults();
// Number of hits since the point was last armed.
uint64_t FaultHits(std::string_view name);
// Releases every present and later delay_until(event).
void FireFaultEvent(std::string_view event);
// Blocks until the point has been hit `hits` times since it was armed. False: `timeout_ms` passed first.
bool WaitForFaultHits(std::string_view name, uint64_t hits, int timeout_ms);

inline constexpr char kEnableFaultsVariable[] = "SPLICE_ENABLE_FAULTS";
// Takes "NAME=ACTION". InvalidArgument says what is wrong with the text; NotFound as above. FailedPrecondition: faults
// are not enabled.
absl::Status ArmFaultFromFlag(std::string_view text);
absl::StatusOr<FaultAction> ParseFaultAction(std::string_view text);

// Disarms everything at the end of a test's scope.
struct ScopedFaults {
  ~ScopedFaults() { DisarmAllFaults(); }
};

}  // namespace spl
