// Reads lists of content parts in a body: text and segments. Segments become marks.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "services/router/request/json_reader.h"
#include "services/router/request/segment_marks.h"

namespace spl::router {

// Joins [{"type":"text","text":…}, {"type":"refusal","refusal":…}, {"type":"segment","text":…,"namespace":…},
// {"type":"segment","knowledge_base":…,"document":…}, …]. Unknown members of parts other than segments are ignored.
// InvalidArgument names a part of another type, or an unknown member of a segment.
absl::StatusOr<std::string> ReadContentParts(const Json& parts, const std::string& field, SegmentMarks* segments);

}  // namespace spl::router
