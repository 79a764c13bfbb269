#include "services/engine/runtime/decode_admission.h"

#include <utility>

#include "services/base/status.h"

namespace spl::engine {

struct DecodeAdmission::Round {
  size_t rows = 0;           // of the batch
  int64_t gathered = 0;      // positions whose keys the next step gathers
  bool ran_slice = false;    // of any sequence
  bool asked_alone = false;  // the next one had the pool for itself and did not fit
  // For which cached KV was evicted; it is asked for once.
  const DecodeSequence* evicted_for = nullptr;
};

void DecodeAdmission::AdmitWaiting() {
  auto& waiting = batch_.waiting();
  Round round{.rows = batch_.counts().running};
  for (size_t i = 0; i < waiting.size();) {
    DecodeSequence& next = *waiting[i];
    if (round.rows + next.num_rows() > static_cast<size_t>(options_.max_rows)) break;
    const bool starts = !next.started();
    const absl::StatusOr<Ready> ready = Advance(next, round);
    if (ready.ok() && *ready == Ready::kNextStep) break;
    if (ready.ok() && *ready == Ready::kLater) {
      ++i;
      continue;
    }
    absl::Status status = ready.status();
    if (status.code() == absl::StatusCode::kResourceExhausted) {
      if (std::exchange(round.evicted_for, &next) != &next && preemption_.EvictCachedFor(next)) continue;
      if (!batch_.running().empty()) break;  // what they hold comes back
      if (preemption_.FindRoomFor(next)) continue;
      if (!preemption_.IsAlone(next)) {
        // Others have pages: what is reserved is committed, or expires, and younger ones that wait with their KV may
        // be able to go on. Nobody would, if they waited for this one.
        ++i;
        continue;
      }
      if (!std::exchange(round.asked_alone, true)) {  // others may have left the pool since
        preemption_.EvictCachedBeside(next);          // a choice needs more than what it goes on with
        continue;
      }
      status = preemption_.TooSmall();
    }
    DecodeBatch::Sequence sequence = std::move(waiting[i]);
    waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(i));
    round.asked_alone = false;
    if (!status.ok()) {
      batch_.Finish(*sequence, status);
    } else if (sequence->num_active() == 0) {
      batch_.Finish(*sequence, absl::OkStatus());  // every first token ended its continuation
    } else {
      round.rows += sequence->num_active();
      if (starts && sequence->request.on_start) sequence->request.on_start();
      batch_.Run(std::move(sequence));
    }
  }
  batch_.RemoveFinished();
}

absl::StatusOr<DecodeAdmission::Ready> DecodeAdmission::Advance(DecodeSequence& next, Round& round) {
  if (next.parked != nullptr) SPLICE_RETURN_IF_ERROR(preemption_.Return(next));
  if (next.started()) return Ready::kNow;
  if (DecodeStart::HasSlices(next)) {
    // One that finds no pages has not run: whoever gives way for it would otherwise be back before its turn comes. It
    // is looked at again when pages are freed.
    if (!round.ran_slice) SPLICE_RETURN_IF_ERROR(start_.RunSlice(next));
    round.ran_slice = true;
    batch_.LookAgain();
    if (DecodeStart::HasSlices(next)) return Ready::kLater;
  }
  const int64_t own = next.gathered_tokens();
  if (own > 0 && round.gathered > 0 && round.gathered + own > options_.gathered_tokens) {
    batch_.LookAgain();
    return Ready::kNextStep;
  }
  if (!start_.HasRoom(next) && !preemption_.IsAlone(next))
    return absl::ResourceExhaustedError("no pages for the continuations");
  SPLICE_RETURN_IF_ERROR(start_.Start(next));
  round.gathered += own;
  return Ready::kNow;
}

}  // namespace spl::engine
