#include "services/router/output_formats/call_writer.h"

namespace spl::router {

void CallWriter::Begin(std::string_view name, OutputDelta* out) {
  out->AddCall({.index = num_calls_++, .id = make_id_(), .name = std::string(name), .arguments = {}});
}

// Pieces that come out together are one delta.
void CallWriter::AddArguments(std::string_view text, OutputDelta* out) {
  if (text.empty()) return;
  const size_t index = num_calls_ - 1;
  if (out->tool_calls.empty() || out->tool_calls.back().index != index)
    out->AddCall({.index = index, .id = {}, .name = {}, .arguments = {}});
  out->tool_calls.back().arguments += text;
}

void CallWriter::Write(const ToolCallDelta& call, OutputDelta* out) {
  Begin(call.name, out);
  AddArguments(call.arguments, out);
}

}  // namespace spl::router
