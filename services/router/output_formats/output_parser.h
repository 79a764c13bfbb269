// Reads the text of an answer as what the model means by it: reasoning, content, calls of tools.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace spl::router {

// A part of a call. The first of a call has its id and the function's name, further ones have neither; the arguments of
// all of them together are the text of a JSON object, or of its beginning if the answer is cut off, or what a model
// wrote in place of one once the call was certain.
struct ToolCallDelta {
  size_t index = 0;  // which call of the answer
  std::string id, name;
  std::string arguments;
  size_t content_bytes = 0;  // content of its OutputDelta that stands in front of it
};

// Additions of a piece of text to the message. Reasoning comes first; calls stand between pieces of content. Parts of
// one call that are added together are one part.
struct OutputDelta {
  std::string reasoning;
  std::string content;
  std::vector<ToolCallDelta> tool_calls;  // by AddCall

  void AddCall(ToolCallDelta call) {
    call.content_bytes = content.size();
    tool_calls.push_back(std::move(call));
  }
};

// Parses one answer, fed in pieces of any size; the deltas put together do not depend on where the pieces end. Text
// that turns out to mean nothing special is content: none is lost, but for white space beside what a format consists
// of. One thread.
class OutputParser {
 public:
  virtual ~OutputParser() = default;
  // Appends to `out` what is certain.
  virtual void Feed(std::string_view text, OutputDelta* out) = 0;
  // The answer has ended: appends everything that was held back. Once, and last.
  virtual void Finish(OutputDelta* out) = 0;
};

// Makes the id of a call, unlike all others.
using MakeCallId = std::function<std::string()>;

// The tools that the model may call in an answer.
struct CallableTools {
  std::string json;  // the request's "tools"
  MakeCallId make_id;
  bool forced = false;  // the answer is what the format's grammar of forced calls makes it (call_grammar.h)
};

// The bytes at the end of `text` that could become `tag`, if more followed. Less than all of the tag.
size_t PartialTag(std::string_view text, std::string_view tag);

inline constexpr std::string_view kWhiteSpace = " \t\n\r";

// Where the text goes on behind white space at `at`; its size: nowhere.
size_t SkipSpace(std::string_view text, size_t at);

// The part of a parser that looks for the tag in front of a call. Text up to it is content. White space in front of it
// is not, and waits for what follows; behind a call it is dropped.
class CallStart {
 public:
  explicit CallStart(std::string_view tag) : tag_(tag) {}
  // Moves content from the beginning of `held` to `out`. True: `held` begins behind the tag now.
  bool Find(std::string* held, OutputDelta* out);
  // A call has ended.
  void Behind() { behind_call_ = true; }
  // There was no call behind the tag: `text` is content, and so are the tag and the white space in front of it.
  void TakeBack(std::string_view text, OutputDelta* out);
  // The answer ends with `held`, in which there is no tag.
  void Finish(std::string* held, OutputDelta* out);

 private:
  const std::string_view tag_;
  std::string space_;         // in front of the tag
  bool behind_call_ = false;  // nothing but white space since the last call
};

}  // namespace spl::router
