// How far an approximate method's logits are from those of the exact one, for one position.
#pragma once

#include <span>

namespace spl::engine {

struct LogitAgreement {
  double cosine = 1;
  bool top1 = true;  // the most likely token is the same
  double top10 = 1;  // of the ten most likely tokens, the share that is the same
};

// REQUIRES: as many logits on both sides, and at least one. Cost: a pass over them and a partial sort.
LogitAgreement CompareLogits(std::span<const float> approximate, std::span<const float> exact);

double CosineOf(std::span<const float> a, std::span<const float> b);

}  // namespace spl::engine
