// What /version and --version report.
#pragma once

namespace spl::router {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace spl::router
