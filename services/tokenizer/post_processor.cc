#include "services/tokenizer/post_processor.h"

#include <string>
#include <utility>

#include "services/base/status.h"
#include "services/tokenizer/bpe.h"

namespace spl::tokenizer {
namespace {

constexpr int kNestingMax = 16;

// special_tokens[name].ids
absl::Status AppendSpecialIds(const JsonField& special_tokens, const std::string& name, std::vector<TokenId>* out) {
  SPLICE_ASSIGN_OR_RETURN(const JsonField token, RequireMember(special_tokens, name));
  SPLICE_ASSIGN_OR_RETURN(const JsonField ids, RequireMember(token, "ids"));
  SPLICE_RETURN_IF_ERROR(RequireArray(ids));
  for (const Json& id : *ids.value) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() > static_cast<uint64_t>(kTokenIdMax)) {
      return InvalidArgument("{} must be ids from 0 to {}, it is {}", ids.where, kTokenIdMax, ids.value->dump());
    }
    out->push_back(id.get<TokenId>());
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<PostProcessor> PostProcessor::Parse(const JsonField& field) {
  PostProcessor processor;
  if (!field.is_null()) SPLICE_RETURN_IF_ERROR(processor.ParseInto(field, 0));
  return processor;
}

absl::Status PostProcessor::ParseTemplate(const JsonField& field) {
  SPLICE_ASSIGN_OR_RETURN(const JsonField single, RequireMember(field, "single"));
  SPLICE_RETURN_IF_ERROR(RequireArray(single));
  Template result;
  int num_texts = 0;
  for (size_t i = 0; i < single.value->size(); ++i) {
    const JsonField item = single.At(i);
    SPLICE_RETURN_IF_ERROR(RequireObject(item));
    if (const std::optional<JsonField> sequence = item.Find("Sequence")) {
      SPLICE_ASSIGN_OR_RETURN(const std::string id, RequireString(*sequence, "id"));
      if (id != "A")
        return InvalidArgument("{}.id is \"{}\": a single text has only the sequence A", sequence->where, id);
      ++num_texts;
      continue;
    }
    SPLICE_ASSIGN_OR_RETURN(const JsonField special, RequireMember(item, "SpecialToken"));
    SPLICE_ASSIGN_OR_RETURN(const std::string name, RequireString(special, "id"));
    SPLICE_ASSIGN_OR_RETURN(const JsonField special_tokens, RequireMember(field, "special_tokens"));
    SPLICE_RETURN_IF_ERROR(AppendSpecialIds(special_tokens, name, num_texts == 0 ? &result.before : &result.after));
  }
  if (num_texts != 1) return InvalidArgument("{} has the sequence A {} times, not once", single.where, num_texts);
  templates_.push_back(std::move(result));
  return absl::OkStatus();
}

absl::Status PostProcessor::ParseInto(const JsonField& field, int depth) {
  SPLICE_ASSIGN_OR_RETURN(const std::string type, TypeOf(field));
  if (type == "TemplateProcessing") return ParseTemplate(field);
  if (type == "ByteLevel") return absl::OkStatus();
  if (type != "Sequence") return InvalidArgument("{}: the post-processor \"{}\" is not supported", field.where, type);
  if (depth >= kNestingMax) return InvalidArgument("{} is nested more than {} deep", field.where, kNestingMax);
  SPLICE_ASSIGN_OR_RETURN(const JsonField list, RequireMember(field, "processors"));
  SPLICE_RETURN_IF_ERROR(RequireArray(list));
  for (size_t i = 0; i < list.value->size(); ++i) SPLICE_RETURN_IF_ERROR(ParseInto(list.At(i), depth + 1));
  return absl::OkStatus();
}

std::vector<TokenId> PostProcessor::Apply(std::vector<TokenId> ids) const {
  for (const Template& part : templates_) {
    ids.insert(ids.begin(), part.before.begin(), part.before.end());
    ids.insert(ids.end(), part.after.begin(), part.after.end());
  }
  return ids;
}

std::vector<TokenId> PostProcessor::AddedIds() const {
  std::vector<TokenId> ids;
  for (const Template& part : templates_) {
    ids.insert(ids.end(), part.before.begin(), part.before.end());
    ids.insert(ids.end(), part.after.begin(), part.after.end());
  }
  return ids;
}

}  // namespace spl::tokenizer
