#include "services/router/output_formats/pythonic.h"

#include <algorithm>
#include <string>
#include <utility>

#include "services/router/output_formats/bracket_scanner.h"
#include "services/router/output_formats/call_writer.h"
#include "services/router/output_formats/python_calls.h"

namespace spl::router {
namespace {

constexpr std::string_view kStart = "<|python_start|>", kEnd = "<|python_end|>";

class Pythonic final : public OutputParser {
 public:
  explicit Pythonic(const MakeCallId& make_id) : calls_(make_id) {}

  void Feed(std::string_view text, OutputDelta* out) override {
    held_ += text;
    while (Step(out)) {
    }
  }

  void Finish(OutputDelta* out) override {
    if (state_ == State::kEnd) {
      const size_t begin = held_.find_first_not_of(kWhiteSpace);
      if (begin != std::string::npos && PartialTag(held_, kEnd) == held_.size() - begin) return;
    }
    if (in_tags_ && state_ != State::kEnd) return start_.TakeBack(held_, out);
    start_.Finish(&held_, out);
  }

 private:
  // kBegin: in front of a list, if there is one. kEnd: behind a list.
  enum class State { kBegin, kList, kEnd, kOutside };

  // Returns whether there is more to do.
  bool Step(OutputDelta* out) {
    switch (state_) {
      case State::kBegin:
        return StartList(out);
      case State::kList:
        return ReadList(out);
      case State::kEnd:
        return EndList();
      case State::kOutside:
        in_tags_ = start_.Find(&held_, out);
        return in_tags_ && Become(State::kBegin);
    }
    return false;
  }

  bool Become(State state) {
    state_ = state;
    return true;
  }

  bool StartList(OutputDelta* out) {
    list_ = held_.find_first_not_of(kWhiteSpace);
    if (list_ == std::string::npos) return false;
    bool certain = false;
    if (held_[list_] != '[' || !MayBePythonCalls(std::string_view(held_).substr(list_), &certain)) return NoList(out);
    if (!certain) return false;
    scanner_.Start();
    scanned_ = list_;
    return Become(State::kList);
  }

  bool ReadList(OutputDelta* out) {
    scanned_ += scanner_.Scan(std::string_view(held_).substr(scanned_));
    if (!scanner_.ended()) return false;
    const auto calls = ReadPythonCalls(std::string_view(held_).substr(list_, scanned_ - list_));
    if (!calls.has_value()) return NoList(out);
    for (const ToolCallDelta& call : *calls) calls_.Write(call, out);
    held_.erase(0, scanned_);
    start_.Behind();
    return Become(State::kEnd);
  }

  bool EndList() {
    const size_t begin = held_.find_first_not_of(kWhiteSpace);
    if (begin == std::string::npos) return false;
    const std::string_view text = std::string_view(held_).substr(begin);
    if (text.starts_with(kEnd)) {
      held_.erase(0, begin + kEnd.size());
    } else if (kEnd.starts_with(text)) {
      return false;
    }
    return Become(State::kOutside);
  }

  bool NoList(OutputDelta* out) {
    if (std::exchange(in_tags_, false)) start_.TakeBack("", out);
    return Become(State::kOutside);
  }

  CallWriter calls_;
  CallStart start_{kStart};
  BracketScanner scanner_{{kEnd}, "\"'"};
  State state_ = State::kBegin;
  std::string held_;      // not yet decided
  size_t list_ = 0;       // where in it the list begins
  size_t scanned_ = 0;    // up to where it was looked at
  bool in_tags_ = false;  // the list stands behind kStart
};

}  // namespace

std::unique_ptr<OutputParser> MakePythonic(const CallableTools& tools) {
  return std::make_unique<Pythonic>(tools.make_id);
}

bool IsPythonic(std::string_view chat_template) { return chat_template.find("[func_name1(") != std::string_view::npos; }

}  // namespace spl::router
