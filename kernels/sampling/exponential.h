// Constants of the exponential by which tokens are weighed, the same in every variant (sampling_math.h has the
// formula). No functions: this header is included by files that are compiled for single instruction sets.
#pragma once

namespace spl::kernels::sampling {

// Exponents below weigh nothing: 2^-62 is far below one unit of a weight.
constexpr float kMinExponent = -62.0f;
// 2^f = 1 + C1 f + … + C6 f^6 for |f| <= 1/2: near-minimax, relative error 2e-9.
constexpr float kExp2C1 = 0.693147182f;
constexpr float kExp2C2 = 0.240226477f;
constexpr float kExp2C3 = 0.0555033237f;
constexpr float kExp2C4 = 0.00961843692f;
constexpr float kExp2C5 = 0.00133988739f;
constexpr float kExp2C6 = 0.000153533605f;

}  // namespace spl::kernels::sampling
