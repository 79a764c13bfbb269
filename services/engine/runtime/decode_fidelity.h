// Watches what choosing tokens does to a share of the sequences: now and then a step also runs over everything that the
// sequence keeps, and the logits are compared.
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
  double share = 0;       // of the sequences that choose tokens
  int32_t interval = 32;  // steps from one comparison to the next
  // On the engine thread; must not block. `kept_mass`: the share of the attention over everything that lies on what was
  // chosen, mean over the heads that chose.
  std::function<void(std::string_view selector, const LogitAgreement&, double kept_mass)> report;
};

// Of a sequence that is watched.
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

  // By lot; null: this one is not. What a selector is compared with is what such a sequence does without one.
  std::unique_ptr<WatchedSequence> Draw(const TokenSelector& selector, std::shared_ptr<const StreamClasses> classes);

  // Around a step of `rows`; watched[i] is row i's, or null. Before: runs those whose turn it is over everything. What
  // that writes at the new position, the step writes again; the step's rows are told to measure what they choose.
  // After: compares, where the step did choose.
  absl::Status BeforeStep(ParallelExecutor& executor, std::span<DecodeRow> rows,
                          std::span<WatchedSequence* const> watched);
  absl::Status AfterStep(ParallelExecutor& executor, std::span<const DecodeRow> rows);

 private:
  const Model& model_;
  const DecodeFidelityOptions options_;
  std::mt19937_64 random_;
  std::vector<size_t> compared_;  // rows of the step under way
  std::vector<float> logits_;     // theirs, over everything
};

}  // namespace spl::engine
