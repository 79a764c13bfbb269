// A hook for those who count what passes of the model compute.
#pragma once

#include <cstdint>
#include <functional>

namespace spl::engine {

// Called on the engine's thread behind each pass that succeeded, with its rows of prompts and of decode steps: both are
// positive where a step shared a pass of prompts. Must be fast. May be null.
using OnPass = std::function<void(int32_t prompt_rows, int32_t decode_rows)>;

}  // namespace spl::engine
