// traceparent and tracestate of any client: nothing, or a context that is written as it was read. The first line is
// the one, the rest the other.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "services/base/trace.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t end = text.find('\n');
  const std::string_view state = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
  const auto context = spl::ParseTraceParent(text.substr(0, end), state);
  if (!context.has_value()) return 0;
  if (!context->valid() || context->state.size() > 512) std::abort();
  const auto again = spl::ParseTraceParent(context->ToTraceParent(), context->state);
  if (!again.has_value() || again->trace_id != context->trace_id || again->span_id != context->span_id ||
      again->sampled != context->sampled || again->state != context->state)
    std::abort();
  return 0;
}
