// Whether a prompt is sent without what its local heads do not keep (docs/methods/redknot.md, "What is sent").
#pragma once

#include <cstddef>
#include <cstdint>

#include "services/engine/cache/stream_classes.h"
#include "services/transport/bandwidth.h"

namespace spl::decode {

// Whether the bytes that are not sent make up for the writes that are more, as `way` measured itself; true where it has
// not. A prompt that is sent in one piece is one write a layer, without its holes one more for each side of a hole; in
// several pieces leaving out costs less than this.
bool LeavingOutPays(const engine::StreamClasses& classes, int64_t num_tokens, size_t page_bytes,
                    const transport::WriteCost& way);

}  // namespace spl::decode
