// Tables of a request's options, by their names in the API. Code that reads, checks or compares options goes through
// them.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <variant>

#include "absl/status/status.h"
#include "services/base/check_range.h"

namespace spl::engine {

template <typename Options>
struct OptionField {
  std::string_view name;  // name of the field of v1.ReuseOptions
  std::variant<int32_t Options::*, double Options::*, bool Options::*, std::string Options::*> member;
  // Range of an int32_t, unless it has its default. A double is a share, 0 to 1, or also -1 if `least` is -1.
  int32_t least = 0;
  int32_t most = std::numeric_limits<int32_t>::max();
};

// InvalidArgument names the field, its value and its range. The default is always valid; often it is -1, for "unset".
template <typename Options>
absl::Status CheckOption(const OptionField<Options>& field, const Options& options) {
  static const Options defaults;
  if (const auto* integer = std::get_if<int32_t Options::*>(&field.member);
      integer != nullptr && options.**integer != defaults.**integer)
    return CheckRange(field.name, options.**integer, field.least, field.most);
  if (const auto* share = std::get_if<double Options::*>(&field.member);
      share != nullptr && options.**share != defaults.**share && !(field.least == -1 && options.**share == -1))
    return CheckShare(field.name, options.**share);
  return absl::OkStatus();
}

}  // namespace spl::engine
