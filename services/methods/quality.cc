#include "services/methods/quality.h"

#include <charconv>

#include "services/methods/methods.h"

namespace spl::methods {

std::optional<Quality> ParseQuality(std::string_view text) {
  if (text.empty() || text == kBalanced) return Quality();
  if (text == kStrict) return Quality{.strict = true};
  double share = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), share);
  // NaN fails the comparisons.
  if (error != std::errc() || end != text.data() + text.size() || !(share > 0 && share <= 1)) return std::nullopt;
  if (share == 1) return Quality{.strict = true};
  return Quality{.agreement = share};
}

}  // namespace spl::methods
