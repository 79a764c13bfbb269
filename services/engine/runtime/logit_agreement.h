// Compares the logits of an approximate method with those of the exact one, for one position.
#pragma once

#include <span>

namespace spl::engine {

struct LogitAgreement {
  double cosine = 1;
  bool top1 = true;  // the most likely token is the same
  double top10 = 1;  // the share of the ten most likely tokens that is the same
};

// REQUIRES: the same number of logits on both sides, at least one. Cost: a pass over them and a partial sort.
LogitAgreement CompareLogits(std::span<const float> approximate, std::span<const float> exact);

double CosineOf(std::span<const float> a, std::span<const float> b);

}  // namespace spl::engine
