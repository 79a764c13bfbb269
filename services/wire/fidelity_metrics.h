// What workers report of methods that are not exact, beside the same position computed exactly.
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
  // The share of exact attention that lies on what the method looks at, 0 to 1.
  void ObserveKeptMass(const std::string& method, double share);
  // A request was to be compared and was not, for want of room.
  void Skip(const std::string& method);

 private:
  Metrics& metrics_;
  const std::string stage_;
};

}  // namespace spl::wire
