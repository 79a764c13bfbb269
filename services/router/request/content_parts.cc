#include "services/router/request/content_parts.h"

#include <utility>

#include "services/router/request/api_error.h"
#include "services/router/request/request.h"

namespace spl::router {
namespace {

// A segment says whose cached KV is used: a misspelt option must not be ignored.
absl::StatusOr<std::string> ReadSegment(ObjectReader& part, PromptSegment piece, SegmentMarks* segments) {
  part.String("namespace", &piece.namespace_name);
  part.String("knowledge_base", &piece.knowledge_base);
  part.String("document", &piece.document);
  SPLICE_RETURN_IF_ERROR(part.Finish());
  SPLICE_RETURN_IF_ERROR(CheckSource(piece, part.Has("text")));
  return segments->Add(std::move(piece));
}

}  // namespace

absl::StatusOr<std::string> ReadContentParts(const Json& parts, const std::string& field, SegmentMarks* segments) {
  std::string text;
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string path = fmt::format("{}[{}]", field, i);
    ObjectReader part(parts[i], path + ".");
    std::string type;
    part.String("type", &type);
    if (type != "text" && type != "segment" && type != "refusal") {
      SPLICE_RETURN_IF_ERROR(part.FinishIgnoring(nullptr));
      return ParamError(path + ".type", "\"{}\" is not served; content parts are of type \"text\" or \"segment\"",
                        type);
    }
    PromptSegment piece{.text = {}, .namespace_name = {}, .field = path};
    const char* const member = type == "refusal" ? "refusal" : "text";
    part.String(member, &piece.text);
    if (type == "segment") {
      SPLICE_ASSIGN_OR_RETURN(const std::string mark, ReadSegment(part, std::move(piece), segments));
      text += mark;
      continue;
    }
    SPLICE_RETURN_IF_ERROR(part.FinishIgnoring(nullptr));
    if (!part.Has(member)) return ParamError(path + "." + member, "is required");
    for (const char* of_segments : {"namespace", "knowledge_base", "document"}) {
      if (part.Has(of_segments)) return ParamError(path + "." + of_segments, "is for parts of type \"segment\"");
    }
    text += piece.text;
  }
  return text;
}

}  // namespace spl::router
