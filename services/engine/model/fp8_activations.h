// From how many rows on products with FP8 weights round their inputs to FP8, too (docs/quantized-weights.md).
#pragma once

#include <cstdint>

namespace spl::engine {

class Model;

// Fewest rows of a pass whose activations are rounded to e4m3 in the first layer; 0: none are.
int64_t FirstRowsInE4M3(const Model& model);

}  // namespace spl::engine
