// Decides whether a prompt is sent without the KV that its local heads do not keep (docs/methods/redknot.md, "What is
// sent").
#pragma once

#include <cstddef>
#include <cstdint>

#include "services/engine/cache/stream_classes.h"
#include "services/transport/bandwidth.h"

namespace spl::decode {

// True if the bytes saved outweigh the cost of additional writes, as `way` measured it; also true if it was not
// measured. A prompt sent in one piece takes one write per layer; leaving out a hole takes one more for each side of
// the hole. For a prompt sent in several pieces this overestimates the cost of leaving out.
// several pieces leaving out costs less than this.
bool LeavingOutPays(const engine::StreamClasses& classes, int64_t num_tokens, size_t page_bytes,
                    const transport::WriteCost& way);

}  // namespace spl::decode
