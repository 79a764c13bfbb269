// Recovery profile: how `sparsex` chooses rows on one model, as it was measured with `splice eval --suite recovery`.
// Stored as recovery.json beside a model; docs/segments.md ("Calibrate") describes the file. Without one the defaults
// of ReuseOptions hold: all layers probe, the upper half scores.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "services/chunk/chunk.h"

namespace spl::engine {

// Immutable once it is read; any thread.
struct RecoveryProfile {
  int32_t num_layers = 0;        // layers of the model that was measured
  int32_t probe_layers = 0;      // in [1, num_layers]
  int32_t score_layers = 0;      // last layers of the probe that score, in [1, probe_layers]
  double recompute_share = 0;    // share of the reused tokens, in (0, 1]
  chunk::Digest fingerprint{};   // the model's; all zero: unknown
  std::string data;              // what was asked, for people
  int64_t answers = 0;           // questions; 0: not measured
  int64_t exact = 0, right = 0;  // right answers of exact, and with this profile

  // InvalidArgument: "SOURCE: MEMBER must be …". `source` is for the message.
  static absl::StatusOr<RecoveryProfile> Parse(const std::string& json, const std::string& source);
  static absl::StatusOr<RecoveryProfile> Load(const std::string& path);  // errors of Parse, and NotFound
  std::string ToJson() const;

  // FailedPrecondition: it was measured on a model with another number of layers or with other weights.
  absl::Status CheckModel(int32_t model_layers, const chunk::Digest& model_fingerprint) const;
};

}  // namespace spl::engine
