#include "services/router/output_formats/pythonic.h"

#include <algorithm>
#include <cctype>
#include <string>
#include <utility>

#include "services/base/status.h"
#include "services/router/output_formats/bracket_scanner.h"
#include "services/router/output_formats/call_writer.h"
#include "services/router/output_formats/python_calls.h"

namespace spl::router {
namespace {

constexpr std::string_view kStart = "<|python_start|>", kEnd = "<|python_end|>";

class Pythonic final : public OutputParser {
 public:
  Pythonic(const MakeCallId& make_id, bool forced) : calls_(make_id), forced_(forced) {}

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
    const auto calls = ReadPythonCalls(std::string_view(held_).substr(list_, scanned_ - list_), forced_);
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
  const bool forced_;
  CallStart start_{kStart};
  BracketScanner scanner_{{kEnd}, "\"'"};
  State state_ = State::kBegin;
  std::string held_;      // not yet decided
  size_t list_ = 0;       // where in it the list begins
  size_t scanned_ = 0;    // up to where it was looked at
  bool in_tags_ = false;  // the list stands behind kStart
};

bool IsPythonName(std::string_view name) {
  return !name.empty() && std::isdigit(static_cast<unsigned char>(name.front())) == 0 &&
         std::all_of(name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) != 0 || c == '_'; });
}

// A value as Python writes it, where that is another way than JSON's, and there is no other value inside of it.
GrammarPart ValuePart(const GrammarPart& schema) {
  const bool plain = schema.is_object() && !schema.contains("enum") && !schema.contains("const");
  const GrammarPart type = plain ? schema.value("type", GrammarPart()) : GrammarPart();
  if (type == "boolean") return AnyOfPart({LiteralPart("True"), LiteralPart("False")});
  if (type == "null") return LiteralPart("None");
  return JsonPart(schema);
}

// The arguments with ", " between them: in front of the first that is required, and behind it. If none is, the comma
// stands behind each.
GrammarPart KeywordsPart(const std::vector<ForcedArgument>& arguments) {
  std::vector<GrammarPart> parts;
  bool behind = false;
  for (const ForcedArgument& argument : arguments) {
    const GrammarPart name = LiteralPart(argument.name + "="), comma = LiteralPart(", ");
    GrammarPart value = ValuePart(argument.schema);
    if (argument.required) {
      parts.push_back(behind ? SequencePart({comma, name, std::move(value)}) : SequencePart({name, std::move(value)}));
      behind = true;
    } else {
      parts.push_back(OptionalPart(behind ? SequencePart({comma, name, std::move(value)})
                                          : SequencePart({name, std::move(value), comma})));
    }
  }
  return parts.empty() ? LiteralPart("") : SequencePart(std::move(parts));
}

}  // namespace

std::unique_ptr<OutputParser> MakePythonic(const CallableTools& tools) {
  return std::make_unique<Pythonic>(tools.make_id, tools.forced);
}

absl::StatusOr<GrammarPart> PythonicGrammar(const ForcedTools& tools) {
  std::vector<CallFrame> calls;
  for (const ForcedTool& tool : tools.tools) {
    if (!IsPythonName(tool.name))
      return InvalidArgument(
          "the tool \"{}\" cannot be forced of a model that writes calls as Python: its name is none", tool.name);
    SPLICE_ASSIGN_OR_RETURN(const std::vector<ForcedArgument> arguments, ForcedArguments(tool, IsPythonName));
    calls.push_back({LiteralPart(tool.name + "("), KeywordsPart(arguments), LiteralPart(")")});
  }
  return SequencePart({LiteralPart("["), SeparatedPart(std::move(calls), ", ", tools.one), LiteralPart("]")});
}

bool IsPythonic(std::string_view chat_template) { return chat_template.find("[func_name1(") != std::string_view::npos; }

}  // namespace spl::router
