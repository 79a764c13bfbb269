#include "services/router/output_formats/framed_answers.h"

#include <utility>

#include "services/router/output_formats/harmony.h"

namespace spl::router {

bool FramesAnswers(const OutputFormat& format) { return format.reasoning == "harmony"; }

GrammarPart FramedAnswer(const OutputFormat& /*format*/, GrammarPart content, bool is_json,
                         const SpecialTokenId& special) {
  return HarmonyAnswer(std::move(content), is_json, special);
}

std::unique_ptr<OutputParser> MakeFramedParser(const OutputFormat& /*format*/, bool in_reasoning) {
  return MakeHarmony(nullptr, in_reasoning, true);
}

}  // namespace spl::router
