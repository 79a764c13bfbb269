// Metrics of approximate methods: how close they are to an exact computation of the same position.
#pragma once

#include <string>

#include "services/base/metrics.h"
#include "services/engine/runtime/logit_agreement.h"

namespace spl::wire {

// splice_fidelity_*, labels stage ("prefill", "decode") and method. Any thread.
class FidelityMetrics {
 public:
  FidelityMetrics(Metrics& metrics, std::string stage) : metrics_(metrics), stage_(std::move(stage)) {}
  void Observe(const std::string& method, const engine::LogitAgreement& agreement);
  // Share of the exact attention that lies on the tokens that the method attends to, 0 to 1.
  void ObserveKeptMass(const std::string& method, double share);
  // Counts a request that was chosen for comparison, but not compared for lack of room.
  void Skip(const std::string& method);

 private:
  Metrics& metrics_;
  const std::string stage_;
};

}  // namespace spl::wire
