#include "services/base/metrics.h"

#include <prometheus/text_serializer.h>

#include <cstdio>
#include <cstdlib>

namespace spl {
namespace {

// A metric outside the prefix, or one series name with two types, is a bug of the program: it ends at start-up.
void CheckName(const std::string& name) {
  if (name.rfind("splice_", 0) == 0) return;
  std::fprintf(stderr, "metric '%s' does not start with splice_\n", name.c_str());
  std::abort();
}

}  // namespace

void RaiseTo(prometheus::Counter& counter, uint64_t value) {
  const double missing = static_cast<double>(value) - counter.Value();
  if (missing > 0) counter.Increment(missing);
}

Metrics::Metrics() : Metrics(MetricLabels{}) {}

Metrics::Metrics(MetricLabels constant_labels)
    : constant_labels_(std::move(constant_labels)), registry_(std::make_shared<prometheus::Registry>()) {}

prometheus::Counter& Metrics::Counter(const std::string& name, const std::string& help, const MetricLabels& labels) {
  CheckName(name);
  return prometheus::BuildCounter().Name(name).Help(help).Labels(constant_labels_).Register(*registry_).Add(labels);
}

prometheus::Gauge& Metrics::Gauge(const std::string& name, const std::string& help, const MetricLabels& labels) {
  CheckName(name);
  return prometheus::BuildGauge().Name(name).Help(help).Labels(constant_labels_).Register(*registry_).Add(labels);
}

prometheus::Histogram& Metrics::Histogram(const std::string& name, const std::string& help,
                                          const std::vector<double>& buckets, const MetricLabels& labels) {
  CheckName(name);
  return prometheus::BuildHistogram()
      .Name(name)
      .Help(help)
      .Labels(constant_labels_)
      .Register(*registry_)
      .Add(labels, buckets);
}

std::string Metrics::Render() const { return prometheus::TextSerializer().Serialize(registry_->Collect()); }

namespace buckets {

// Each set lives for the whole process: histograms copy it, callers only borrow it.
const std::vector<double>& TimeToFirstToken() {
  static const auto* const bounds =
      new std::vector<double>{0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
                              1.0,   2.5,   5.0,  7.5,  10,   20,   40,   80,  160,  640, 2560};
  return *bounds;
}

const std::vector<double>& InterToken() {
  static const auto* const bounds =
      new std::vector<double>{0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
                              0.4,    0.5,   0.75,   1.0,   2.5,  5.0,   7.5,  10,    20,  40,   80};
  return *bounds;
}

const std::vector<double>& RequestLatency() {
  static const auto* const bounds = new std::vector<double>{0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5,
                                                            5.0,  10,    15,   20,  30,  40,  60,  120, 240, 640, 2560};
  return *bounds;
}

const std::vector<double>& Stage() {
  static const auto* const bounds =
      new std::vector<double>{0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
                              0.25,   0.5,     1.0,    2.5,   5.0,    10,    20,   40,    160,  640};
  return *bounds;
}

const std::vector<double>& Decision() {
  static const auto* const bounds =
      new std::vector<double>{1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.1, 1.0};
  return *bounds;
}

const std::vector<double>& Tokens() {
  static const auto* const bounds = [] {
    auto* const powers = new std::vector<double>;
    for (double bound = 1; bound <= 131072; bound *= 2) powers->push_back(bound);
    return powers;
  }();
  return *bounds;
}

}  // namespace buckets
}  // namespace spl
