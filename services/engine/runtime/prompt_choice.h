// The method of a prompt in a prefill engine, chosen when its copies are known (methods/method_choice.h).
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "services/engine/runtime/prefill_job.h"

namespace spl::engine {

// Says in the job's statistics what was chosen. If another method than the job's policy: replaces the policy. If exact:
// the copies are gone from `hits` and `layout`. A prompt that another method is to be measured on keeps its KV for
// itself, so that the measurement finds the copies that the prompt found.
absl::Status ChooseMethodOf(PrefillJob& job, const Model& model, std::vector<SegmentHit>& hits, ReuseLayout& layout);

}  // namespace spl::engine
