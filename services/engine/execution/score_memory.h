// Memory for the scores of prompts. It is kept for the next prompt, because a device waits for all of its work, that of
// other prompts and engines too, before it gives memory back.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend/backend.h"
#include "kernels/backend/session.h"

namespace spl::engine {

// Belongs to one session, whose work alone may use the scores. Scores may be destroyed on any thread, and may outlive
// this object.
class ScoreMemory {
 public:
  ScoreMemory();
  // `count` zeros in f32 for the session's next work; the host waits for nothing if there is memory of this size.
  // ResourceExhausted: the device has no room.
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> Take(const kernels::Backend& backend, kernels::Session& session,
                                                        int64_t count);

  static constexpr size_t kMostKept = 4;                   // buffers that wait for the next prompt
  static constexpr size_t kLargestKept = size_t{4} << 20;  // bytes; larger ones are freed

 private:
  struct Kept;
  class Scores;
  const std::shared_ptr<Kept> kept_;
};

}  // namespace spl::engine
