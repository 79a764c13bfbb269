#include "services/engine/model/fp8_activations.h"

#include "services/engine/model/model.h"

namespace spl::engine {

int64_t FirstRowsInE4M3(const Model& model) {
  constexpr int64_t kMost = 1024;  // far more than any backend waits for
  const LayerWeights& layer = model.rank(0).layer(0);
  for (int64_t rows = 1; model.quantizes_activations() && rows <= kMost; ++rows) {
    if (layer.qkv->PrefersE4M3(rows)) return rows;
  }
  return 0;
}

}  // namespace spl::engine
