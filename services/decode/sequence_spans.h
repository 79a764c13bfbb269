// Trace spans of a sequence that is being decoded.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "services/base/trace.h"

namespace spl::decode {

// A sequence's time on this worker: waiting for a place in the batch, its first step, the rest. Begin is called by the
// engine thread before the first step, all others behind it by the thread that delivers tokens.
struct SequenceSpans {
  SequenceSpans(const Tracer& tracer, const TraceContext& parent)
      : tracer(tracer), whole(tracer, "decode.sequence", parent), part(tracer, "decode.admission", whole.context()) {}
  void Begin(std::string_view name) {
    part.End();
    part = Span(tracer, name, whole.context());
  }
  void OnTokens(size_t num) {
    if (num_tokens == 0) Begin("decode.stream");
    num_tokens += static_cast<int64_t>(num);
  }
  void End(const absl::Status& status) {
    part.End();
    whole.Set("splice.tokens", num_tokens);
    whole.SetStatus(status);
    whole.End();
  }

  const Tracer& tracer;
  Span whole, part;
  int64_t num_tokens = 0;
};

}  // namespace spl::decode
