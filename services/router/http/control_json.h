// JSON of the operators' API: requests, clocks, the history.
#pragma once

#include <chrono>
#include <optional>

#include "services/router/fleet/clock_offset.h"
#include "services/router/request/answer_json.h"
#include "services/router/telemetry/history.h"
#include "services/router/telemetry/quality_records.h"
#include "services/router/telemetry/request_log.h"

namespace spl::router {

OrderedJson RecordJson(const RequestRecord& record);
// Null while it is not known.
OrderedJson ClockJson(const std::optional<ClockOffset>& clock);
// A worker's record of a method, and how long ago a receipt told it.
OrderedJson QualityJson(const QualityRecord& record, SteadyTime now);
// The samples of the last `age`: "unix_ms", the times at which they ended, and in "columns" an array of equal length
// for each of HistoryColumns. Values have five digits; NaN is null.
OrderedJson HistoryJson(const History& history, std::chrono::milliseconds age);

}  // namespace spl::router
