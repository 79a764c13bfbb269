// How many sequences of one length a page pool holds, dense and with head classes, shown by decoding with all of them.
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
  int32_t steps = 4;            // decoded with all sequences at once, behind one that warms up
  uint64_t kv_bytes = 1 << 30;  // of the pool, all ranks together
  int32_t max_sequences = 256;  // of one step at most
  int32_t num_threads = 0;
};

struct CapacityRow {
  std::string classes;                    // "dense", or what the map is called
  int32_t num_global = 0, num_heads = 0;  // as served: the first layers are global whatever the map says
  int64_t kept_tokens = 0;  // over all heads, of a sequence of `context` (docs/methods/redknot.md, "What is sent")
  int64_t pages = 0;        // that a sequence takes when the steps are done
  int32_t sequences = 0;    // that fit and were decoded together
  bool at_limit = false;    // more fit than max_sequences
  double step_s = 0;        // median
};

// Runs with `map`, or dense without. The prompts' KV is random: what is measured does not depend on it.
// InvalidArgument: the context does not fit the model. ResourceExhausted: not one sequence fits.
absl::StatusOr<CapacityRow> MeasureCapacity(const std::shared_ptr<const engine::Model>& model,
                                            const CapacityOptions& options, const std::string& name,
                                            const engine::HeadClassMap* map);

// The first row is what the others are compared with.
std::string CapacityText(const std::vector<CapacityRow>& rows, const CapacityOptions& options, size_t page_bytes);
nlohmann::ordered_json CapacityJson(const std::vector<CapacityRow>& rows, const CapacityOptions& options,
                                    size_t page_bytes);

}  // namespace spl::cli
