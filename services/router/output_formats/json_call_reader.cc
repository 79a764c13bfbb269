#include "services/router/output_formats/json_call_reader.h"

#include "services/router/output_formats/tool_call_json.h"

namespace spl::router {

using Result = JsonCallReader::Result;

Result JsonCallReader::Read(std::string* held, OutputDelta* out) {
  switch (state_) {
    case State::kHead:
      return ReadHead(held, out);
    case State::kWhole:
      return ReadWhole(held, out);
    case State::kArguments:
      return ReadArguments(held, out);
    case State::kRest:
      return ReadRest(held);
  }
  return Result::kNoCall;
}

Result JsonCallReader::ReadHead(std::string* held, OutputDelta* out) {
  const CallHead head = ReadCallHead(*held);
  if (head.state == CallHead::kMore) return Result::kMore;
  scanner_.Start();
  if (head.state == CallHead::kNone) {
    state_ = State::kWhole;
    scanned_ = 0;
    return ReadWhole(held, out);
  }
  calls_->Begin(head.name, out);
  held->erase(0, head.arguments);
  state_ = State::kArguments;
  return ReadArguments(held, out);
}

Result JsonCallReader::ReadWhole(std::string* held, OutputDelta* out) {
  scanned_ += scanner_.Scan(std::string_view(*held).substr(scanned_));
  if (!scanner_.ended()) return Result::kMore;
  const auto call = ReadToolCall(std::string_view(*held).substr(0, scanned_), false);
  if (!call.has_value()) return Result::kNoCall;
  calls_->Write(*call, out);
  held->erase(0, scanned_);
  return Result::kCall;
}

Result JsonCallReader::ReadArguments(std::string* held, OutputDelta* out) {
  const size_t length = scanner_.Scan(*held);
  calls_->AddArguments(std::string_view(*held).substr(0, length), out);
  held->erase(0, length);
  if (!scanner_.ended()) return Result::kMore;
  state_ = State::kRest;
  scanner_.Start(1);
  rest_.clear();
  return ReadRest(held);
}

// Further members mean nothing, and the bracket may be missing.
Result JsonCallReader::ReadRest(std::string* held) {
  const size_t length = scanner_.Scan(*held);
  rest_ += std::string_view(*held).substr(0, length);
  held->erase(0, length);
  if (!scanner_.ended()) return Result::kMore;
  const bool blank = rest_.find_first_not_of(kWhiteSpace) == std::string::npos;
  if (!blank && !IsJsonObject("{\"\": 0" + rest_)) held->insert(0, rest_);
  return Result::kCall;
}

Result JsonCallReader::Finish(std::string* held, OutputDelta* out) {
  if (state_ == State::kHead || state_ == State::kWhole) return Result::kNoCall;
  if (state_ == State::kArguments) {
    calls_->AddArguments(*held, out);
    held->clear();
  } else {
    held->insert(0, rest_);
  }
  return Result::kCall;
}

}  // namespace spl::router
