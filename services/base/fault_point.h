// Named places where tests make things go wrong: compiled into every build, one relaxed load when disarmed.
//
//   static FaultPoint write_fault("kvstore.slab.write");           // at namespace scope in a .cc
//   if (write_fault.armed()) SPLICE_RETURN_IF_ERROR(write_fault.Hit().status);
//
// Armed by a test (Arm) or by the hidden flag --fault NAME=ACTION, which wants SPLICE_ENABLE_FAULTS=1 in the
// environment: nobody breaks a program that serves by a flag alone. ACTION is one of
//   error(CODE)          Hit().status has that canonical code, e.g. error(UNAVAILABLE)
//   delay_until(EVENT)   Hit blocks until FireFaultEvent(EVENT), 60 s at most, then DeadlineExceeded
//   delay(MS)            Hit blocks for so many milliseconds, 60,000 at most
//   drop                 Hit().drop: the caller leaves the operation out
//   crash                abort()
//   kill                 SIGKILL to this process: nothing is flushed, nothing runs at exit
//   corrupt              Hit().corrupt: the caller damages the bytes at hand
// and may end in @N: only the N-th hit (from 1) acts, all others pass.
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
  absl::StatusCode code = absl::StatusCode::kUnavailable;  // of kError
  std::string event;                                       // of kDelayUntil
  uint32_t delay_ms = 0;                                   // of kDelay
  uint64_t only_hit = 0;                                   // 0: every hit acts
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
  // What the armed action asks for; an empty outcome when disarmed. Counts the hit.
  FaultOutcome Hit() const { return armed() ? HitArmed() : FaultOutcome(); }

 private:
  FaultOutcome HitArmed() const;

  const std::string name_;
  std::atomic<bool>* armed_;  // of the process-wide table, never freed
};

// NotFound: no linked-in code has a fault point of that name.
absl::Status ArmFault(std::string_view name, FaultAction action);
void DisarmFault(std::string_view name);
void DisarmAllFaults();
// Hits since the point was last armed.
uint64_t FaultHits(std::string_view name);
// Lets every present and later delay_until(event) pass.
void FireFaultEvent(std::string_view event);
// Blocks until the point was hit `hits` times since it was armed; false after `timeout_ms`.
bool WaitForFaultHits(std::string_view name, uint64_t hits, int timeout_ms);

inline constexpr char kEnableFaultsVariable[] = "SPLICE_ENABLE_FAULTS";
// "NAME=ACTION". InvalidArgument says what the text lacks; NotFound as above. FailedPrecondition: not enabled.
absl::Status ArmFaultFromFlag(std::string_view text);
absl::StatusOr<FaultAction> ParseFaultAction(std::string_view text);

// Disarms everything at the end of a test's scope.
struct ScopedFaults {
  ~ScopedFaults() { DisarmAllFaults(); }
};

}  // namespace spl
