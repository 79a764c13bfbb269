// State of a running loop, which its `loop` variable shows.
#pragma once

#include <cstddef>

#include "services/tokenizer/jinja/value.h"

namespace spl::tokenizer::jinja {

struct LoopState {
  List items;
  size_t idx = 0;
};

}  // namespace spl::tokenizer::jinja
