// Measures how many sequences of one length a page pool holds, dense and with head classes, by decoding with all of
// them.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/engine/engine.h"

namespace spl::cli {

struct CapacityOptions {
  int64_t context = 0;          // tokens of each sequence before the first step
  int32_t steps = 4;            // decode steps with all sequences at once, after one for warm-up
  uint64_t kv_bytes = 1 << 30;  // size of the pool, all ranks together
  int32_t max_sequences = 256;  // most sequences in one step
  int32_t num_threads = 0;
};

struct CapacityRow {
  std::string classes;                    // "dense", or the name of the map
  int32_t num_global = 0, num_heads = 0;  // as served: heads of the first layers are always global
  int64_t kept_tokens = 0;  // sum over all heads for a sequence of `context` (docs/methods/redknot.md, "What is sent")
  int64_t pages = 0;        // pages of a sequence after the last step
  int32_t sequences = 0;    // number that fit and were decoded together
  bool at_limit = false;    // more than max_sequences would fit
  double step_s = 0;        // median
};

// Measures one row. The KV of the prompts is random: results do not depend on it. InvalidArgument: the context does not
// fit the model. ResourceExhausted: not even one sequence fits. `map` null: dense.
absl::StatusOr<CapacityRow> MeasureCapacity(const std::shared_ptr<const engine::Model>& model,
                                            const CapacityOptions& options, const std::string& name,
                                            const engine::HeadClassMap* map);

// Compares the rows with the first one.
std::string CapacityText(const std::vector<CapacityRow>& rows, const CapacityOptions& options, size_t page_bytes);
nlohmann::ordered_json CapacityJson(const std::vector<CapacityRow>& rows, const CapacityOptions& options,
                                    size_t page_bytes);

}  // namespace spl::cli
