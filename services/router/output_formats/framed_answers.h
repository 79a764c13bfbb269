// Answers in a given form, in formats that put something in front of every answer.
#pragma once

#include <memory>

#include "services/router/output_formats/call_grammar.h"
#include "services/router/output_formats/output_parser.h"
#include "services/router/output_formats/registry.h"

namespace spl::router {

// True: models of this format write a header in front of content, and perhaps reasoning in front of that.
bool FramesAnswers(const OutputFormat& format);

// `content` with what the format puts in front of it. `is_json`: all that fits it is JSON. REQUIRES: FramesAnswers.
GrammarPart FramedAnswer(const OutputFormat& format, GrammarPart content, bool is_json, const SpecialTokenId& special);

// Reads an answer that FramedAnswer made: all that fits `content` is content, byte for byte. `in_reasoning`: see
// EndsInReasoning. REQUIRES: FramesAnswers.
std::unique_ptr<OutputParser> MakeFramedParser(const OutputFormat& format, bool in_reasoning);

}  // namespace spl::router
