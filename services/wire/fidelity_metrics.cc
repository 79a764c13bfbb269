#include "services/wire/fidelity_metrics.h"

#include <vector>

namespace spl::wire {
namespace {

const std::vector<double>& CosineBuckets() {
  static const std::vector<double> bounds = {0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9999};
  return bounds;
}
const std::vector<double>& TenthBuckets() {
  static const std::vector<double> bounds = {0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95};
  return bounds;
}

const std::vector<double>& KeptMassBuckets() {
  static const std::vector<double> bounds = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999};
  return bounds;
}

}  // namespace

void FidelityMetrics::Observe(const std::string& method, const engine::LogitAgreement& agreement) {
  const MetricLabels labels = {{"stage", stage_}, {"method", method}};
  metrics_
      .Histogram("splice_fidelity_cosine", "Cosine of the logits of a method and the exact ones, of one position.",
                 CosineBuckets(), labels)
      .Observe(agreement.cosine);
  metrics_
      .Histogram("splice_fidelity_top10_share", "Share of the ten most likely tokens that is the same.", TenthBuckets(),
                 labels)
      .Observe(agreement.top10);
  metrics_
      .Counter("splice_fidelity_samples_total", "Positions that were also computed exactly, to be compared.", labels)
      .Increment();
  metrics_
      .Counter("splice_fidelity_top1_equal_total", "Compared positions whose most likely token is the same.", labels)
      .Increment(agreement.top1 ? 1 : 0);
}

void FidelityMetrics::ObserveKeptMass(const std::string& method, double share) {
  metrics_
      .Histogram("splice_fidelity_kept_mass", "Share of exact attention that lies on what the method looks at.",
                 KeptMassBuckets(), {{"stage", stage_}, {"method", method}})
      .Observe(share);
}

void FidelityMetrics::Skip(const std::string& method) {
  metrics_
      .Counter("splice_fidelity_skipped_total", "Requests that were to be compared and were not, for want of room.",
               {{"stage", stage_}, {"method", method}})
      .Increment();
}

}  // namespace spl::wire
