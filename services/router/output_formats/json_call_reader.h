// A call that is written as a JSON object, read while it is written: what several formats have in common.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "services/router/output_formats/bracket_scanner.h"
#include "services/router/output_formats/call_writer.h"
#include "services/router/output_formats/output_parser.h"

namespace spl::router {

// Reads {"name": NAME, "arguments": {…}}, or with "parameters". The call is certain, and begins, where its arguments do
// if the name stands in front of them (ReadCallHead); from there on they come out as they are written, whatever
// follows. Another object is a call if it is one when it is complete (ReadToolCall). One thread.
class JsonCallReader {
 public:
  enum class Result { kMore, kCall, kNoCall };

  // `end_tags`: outside of strings they end the object, closed or not. Borrows `calls`.
  JsonCallReader(std::vector<std::string_view> end_tags, CallWriter* calls)
      : scanner_(std::move(end_tags)), calls_(calls) {}

  // The next text begins with the object's bracket.
  void Start() { state_ = State::kHead; }
  // Takes what is certain from the beginning of `held`. kMore: the object goes on. kCall: `held` begins behind the
  // object; what stood behind its arguments and does not end the object is there again. kNoCall: `held` is as it was.
  Result Read(std::string* held, OutputDelta* out);
  // The answer ends with `held`. Never kMore.
  Result Finish(std::string* held, OutputDelta* out);

 private:
  enum class State { kHead, kWhole, kArguments, kRest };

  Result ReadHead(std::string* held, OutputDelta* out);
  Result ReadWhole(std::string* held, OutputDelta* out);
  Result ReadArguments(std::string* held, OutputDelta* out);
  Result ReadRest(std::string* held);

  BracketScanner scanner_;
  CallWriter* const calls_;
  State state_ = State::kHead;
  size_t scanned_ = 0;  // bytes of an object that is a call only when it is complete
  std::string rest_;    // behind the arguments
};

}  // namespace spl::router
