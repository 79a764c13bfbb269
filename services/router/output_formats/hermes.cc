#include "services/router/output_formats/hermes.h"

#include <algorithm>

#include "services/router/output_formats/call_writer.h"
#include "services/router/output_formats/json_call_reader.h"
#include "services/router/output_formats/tagged_calls.h"

namespace spl::router {
namespace {

class Hermes final : public OutputParser {
 public:
  explicit Hermes(const MakeCallId& make_id) : calls_(make_id) {}

  void Feed(std::string_view text, OutputDelta* out) override {
    held_ += text;
    while (Step(out)) {
    }
  }

  void Finish(OutputDelta* out) override {
    if (state_ == State::kOutside) return start_.Finish(&held_, out);
    if (state_ == State::kStart) return start_.TakeBack(held_, out);
    if (state_ == State::kObject && reader_.Finish(&held_, out) == JsonCallReader::Result::kNoCall)
      return start_.TakeBack(space_ + held_, out);
    const size_t begin = held_.find_first_not_of(kWhiteSpace);
    if (begin == std::string::npos || PartialTag(held_, kCallEnd) == held_.size() - begin) return;
    out->content += held_.substr(begin);
  }

 private:
  // kStart: behind the tag. kEnd: behind the object, in front of the end tag.
  enum class State { kOutside, kStart, kObject, kEnd };

  // Returns whether there is more to do.
  bool Step(OutputDelta* out) {
    switch (state_) {
      case State::kOutside:
        if (!start_.Find(&held_, out)) return false;
        state_ = State::kStart;
        return true;
      case State::kStart:
        return StartObject(out);
      case State::kObject:
        return ReadObject(out);
      case State::kEnd:
        return EndCall(out);
    }
    return false;
  }

  bool StartObject(OutputDelta* out) {
    const size_t begin = held_.find_first_not_of(kWhiteSpace);
    if (begin == std::string::npos) return false;
    space_ = held_.substr(0, begin);
    held_.erase(0, begin);
    if (held_.front() != '{') return NoCall(out);
    reader_.Start();
    state_ = State::kObject;
    return true;
  }

  bool ReadObject(OutputDelta* out) {
    const JsonCallReader::Result result = reader_.Read(&held_, out);
    if (result == JsonCallReader::Result::kNoCall) return NoCall(out);
    if (result == JsonCallReader::Result::kCall) state_ = State::kEnd;
    return state_ == State::kEnd;
  }

  // Text between the object and the end tag is content. Models also leave the tag out and begin the next call.
  bool EndCall(OutputDelta* out) {
    const size_t end = held_.find(kCallEnd);
    const size_t stop = std::min(end, held_.find(kCallStart));
    if (stop == std::string::npos) return false;
    const size_t begin = std::min(held_.find_first_not_of(kWhiteSpace), stop);
    out->content += held_.substr(begin, stop - begin);
    held_.erase(0, stop == end ? stop + kCallEnd.size() : stop);
    start_.Behind();
    state_ = State::kOutside;
    return true;
  }

  // The text behind the tag is content, in which there may be another tag.
  bool NoCall(OutputDelta* out) {
    start_.TakeBack(space_, out);
    state_ = State::kOutside;
    return true;
  }

  CallWriter calls_;
  CallStart start_{kCallStart};
  JsonCallReader reader_{{kCallEnd, kCallStart}, &calls_};
  State state_ = State::kOutside;
  std::string held_;   // not yet decided
  std::string space_;  // behind the tag
};

}  // namespace

std::unique_ptr<OutputParser> MakeHermes(const CallableTools& tools) { return std::make_unique<Hermes>(tools.make_id); }

absl::StatusOr<GrammarPart> HermesGrammar(const ForcedTools& tools) {
  std::vector<CallFrame> calls;
  for (const ForcedTool& tool : tools.tools) {
    calls.push_back({TagPart(tools, kCallStart),
                     SequencePart({LiteralPart("\n{\"name\": \"" + tool.name + "\", \"arguments\": "),
                                   JsonPart(tool.parameters), LiteralPart("}\n")}),
                     TagPart(tools, kCallEnd)});
  }
  return SeparatedPart(std::move(calls), "\n", tools.one);
}

// Qwen3-Coder and GLM-4.5 have the tag, too, around something else.
bool IsHermes(std::string_view chat_template) {
  const auto has = [&](std::string_view text) { return chat_template.find(text) != std::string_view::npos; };
  return has(kCallStart) && has("\"arguments\"") && !has("<function=") && !has("<arg_key>");
}

}  // namespace spl::router
