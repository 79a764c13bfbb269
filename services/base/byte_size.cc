#include "services/base/byte_size.h"

#include <charconv>
#include <cmath>

#include "services/base/status.h"

namespace spl {
namespace {

struct Unit {
  std::string_view name;
  double bytes;
};

constexpr Unit kUnits[] = {
    {"", 1},        {"B", 1},          {"KiB", 1024.0},          {"MiB", 1048576.0}, {"GiB", 1073741824.0},
    {"KB", 1000.0}, {"MB", 1000000.0}, {"TiB", 1099511627776.0}, {"GB", 1e9},        {"TB", 1e12},
};

}  // namespace

absl::StatusOr<uint64_t> ParseByteSize(std::string_view text) {
  const size_t number_end = text.find_first_not_of("0123456789.");
  const std::string_view number = text.substr(0, number_end);
  std::string_view unit = number_end == std::string_view::npos ? std::string_view() : text.substr(number_end);
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  double value = 0;
  const auto [parsed_to, error] = std::from_chars(number.data(), number.data() + number.size(), value);
  if (number.empty() || error != std::errc() || parsed_to != number.data() + number.size()) {
    return InvalidArgument("size '{}' does not start with a number; write for example 512MiB", text);
  }
  for (const Unit& known : kUnits) {
    if (known.name != unit) continue;
    const double bytes = value * known.bytes;
    if (bytes > 9.2e18) return InvalidArgument("size '{}' is more than 2^63 bytes", text);
    return static_cast<uint64_t>(std::llround(bytes));
  }
  return InvalidArgument("size '{}' has the unknown unit '{}'; use B, KiB, MiB, GiB, TiB, KB, MB, GB or TB", text,
                         unit);
}

std::string FormatByteSize(uint64_t bytes) {
  constexpr const char* kNames[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024 && unit < 5) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, kNames[unit]);
}

}  // namespace spl
