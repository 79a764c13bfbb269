// Measures the quality of token selection for a share of the sequences. From time to time a step also runs over
// everything that the sequence keeps, and the logits are compared.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "services/engine/execution/parallel_executor.h"
#include "services/engine/runtime/logit_agreement.h"

namespace spl::engine {

struct DecodeFidelityOptions {
  double share = 0;       // share of the sequences that choose tokens
  int32_t interval = 32;  // steps from one comparison to the next
  // Runs on the engine thread; must not block. `kept_mass`: share of the full attention that lies on the chosen tokens,
  // mean over the heads that chose.
  std::function<void(std::string_view selector, const LogitAgreement&, double kept_mass)> report;
};

// State of a sequence that is watched.
struct WatchedSequence {
  std::unique_ptr<TokenSelector> everything;
  int64_t steps = 0;
  MassProbe mass;
};

// Engine thread only.
class DecodeFidelity {
 public:
  DecodeFidelity(const Model& model, DecodeFidelityOptions options)
      : model_(model), options_(std::move(options)), random_(std::random_device{}()) {}

  // Decides by lot whether to watch a sequence; null: it is not watched. A selector is compared with decoding the same
  // sequence without a selector.
  std::unique_ptr<WatchedSequence> Draw(const TokenSelector& selector, std::shared_ptr<const StreamClasses> classes);

  // Must be called before and after a step of `rows`; watched[i] is row i's, or null. BeforeStep runs the rows that are
  // due over everything. It writes KV at the new position, which the step writes again, and sets these rows to measure
  // what they choose. AfterStep compares the rows that did choose.
  absl::Status BeforeStep(ParallelExecutor& executor, std::span<DecodeRow> rows,
                          std::span<WatchedSequence* const> watched);
  absl::Status AfterStep(ParallelExecutor& executor, std::span<const DecodeRow> rows);

 private:
  const Model& model_;
  const DecodeFidelityOptions options_;
  std::mt19937_64 random_;
  std::vector<size_t> compared_;  // rows of the current step
  std::vector<float> logits_;     // their logits over everything
};

}  // namespace spl::engine
