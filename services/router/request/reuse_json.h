// Reads the options of a request from JSON, by the declaration of v1.ReuseOptions.
#pragma once

#include "services/router/request/json_reader.h"
#include "spl/v1/reuse.pb.h"

namespace spl::router {

// Reads the members of the object "splice" that are options, directly or in the object of their group. Absent and null
// members leave an option unset. The reader fails if an option stands in both places, or a group has an unknown member.
void ReadReuseOptions(ObjectReader& reader, v1::ReuseOptions& reuse);

}  // namespace spl::router
