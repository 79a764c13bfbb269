// The JSON of requests: its type, and the reader of its objects.
#pragma once

#include "services/base/json_object_reader.h"
#include "services/base/json_parser.h"

namespace spl::router {

using Json = nlohmann::ordered_json;
using ObjectReader = JsonObjectReader<Json>;

}  // namespace spl::router
