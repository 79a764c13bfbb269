// Writes the deltas of the calls of one answer.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

#include "services/router/output_formats/output_parser.h"

namespace spl::router {

// Numbers calls and gives each its id. One thread.
class CallWriter {
 public:
  explicit CallWriter(MakeCallId make_id) : make_id_(std::move(make_id)) {}

  // The next call begins.
  void Begin(std::string_view name, OutputDelta* out);
  // A piece of the arguments of the call that was begun last.
  void AddArguments(std::string_view text, OutputDelta* out);
  // A call that is complete. Its index and id are set here.
  void Write(const ToolCallDelta& call, OutputDelta* out);

  size_t num_calls() const { return num_calls_; }

 private:
  const MakeCallId make_id_;
  size_t num_calls_ = 0;
};

}  // namespace spl::router
