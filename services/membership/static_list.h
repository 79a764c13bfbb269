// Members that are known when the program starts, and never change.
#pragma once

#include "services/membership/membership.h"

namespace spl::membership {

std::unique_ptr<Discovery> MakeStaticList(const std::vector<std::string>& prefill,
                                          const std::vector<std::string>& decode);

}  // namespace spl::membership
