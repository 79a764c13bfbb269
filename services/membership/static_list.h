// Members that are known at the start of the program and never change.
#pragma once

#include "services/membership/membership.h"

namespace spl::membership {

std::unique_ptr<Discovery> MakeStaticList(const std::vector<std::string>& prefill,
                                          const std::vector<std::string>& decode);

}  // namespace spl::membership
