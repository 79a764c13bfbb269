// How often the first token of a method was that of exact, and what that proves.
#pragma once

#include <string_view>

#include "services/chunk/chunk.h"

namespace spl::engine {

// Bounds of a share that was seen in `weight` observations, after Wilson. Each is wrong in one case of twenty. Without
// observations: 0 and 1.
double WilsonLow(double share, double weight);
double WilsonHigh(double share, double weight);

struct Agreement {
  double weight = 0;         // comparisons; older ones count less
  double share = 0;          // those with the same token
  double low = 0, high = 1;  // bounds of the share by which methods are judged
};

// Knows how methods have done. Any thread.
class AgreementSource {
 public:
  virtual ~AgreementSource() = default;
  // `method`: MethodChoice::record.
  virtual Agreement Of(const chunk::Digest& namespace_key, std::string_view method) const = 0;
  // The largest lower bound that any record can reach.
  virtual double provable() const = 0;
};

}  // namespace spl::engine
