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
  SPLICE_ASSIGN_OR_RETURN(const JsonField token, special_tokens.Require(name));
  SPLICE_ASSIGN_OR_RETURN(const JsonField ids, token.Require("ids"));
  SPLICE_RETURN_IF_ERROR(ids.CheckList());
  for (const nlohmann::json& id : *ids.value) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() > static_cast<uint64_t>(kTokenIdMax)) {
      return ids.Wrong(fmt::format("ids between 0 and {}", kTokenIdMax));
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
  SPLICE_ASSIGN_OR_RETURN(const JsonField single, field.Require("single"));
  SPLICE_RETURN_IF_ERROR(single.CheckList());
  Template result;
  int num_texts = 0;
  for (size_t i = 0; i < single.value->size(); ++i) {
    const JsonField item = single.At(i);
    SPLICE_RETURN_IF_ERROR(item.CheckObject());
    if (const std::optional<JsonField> sequence = item.Find("Sequence")) {
      SPLICE_ASSIGN_OR_RETURN(const std::string id, sequence->RequireString("id"));
      if (id != "A")
        return InvalidArgument("{}.id is \"{}\": a single text has only the sequence A", sequence->path, id);
      ++num_texts;
      continue;
    }
    SPLICE_ASSIGN_OR_RETURN(const JsonField special, item.Require("SpecialToken"));
    SPLICE_ASSIGN_OR_RETURN(const std::string name, special.RequireString("id"));
    SPLICE_ASSIGN_OR_RETURN(const JsonField special_tokens, field.Require("special_tokens"));
    SPLICE_RETURN_IF_ERROR(AppendSpecialIds(special_tokens, name, num_texts == 0 ? &result.before : &result.after));
  }
  if (num_texts != 1) return InvalidArgument("{} has the sequence A {} times, not once", single.path, num_texts);
  templates_.push_back(std::move(result));
  return absl::OkStatus();
}

absl::Status PostProcessor::ParseInto(const JsonField& field, int depth) {
  SPLICE_ASSIGN_OR_RETURN(const std::string type, field.RequireString("type"));
  if (type == "TemplateProcessing") return ParseTemplate(field);
  if (type == "ByteLevel") return absl::OkStatus();
  if (type != "Sequence") return InvalidArgument("{}: the post-processor \"{}\" is not supported", field.path, type);
  if (depth >= kNestingMax) return InvalidArgument("{} is nested more than {} deep", field.path, kNestingMax);
  SPLICE_ASSIGN_OR_RETURN(const JsonField list, field.Require("processors"));
  SPLICE_RETURN_IF_ERROR(list.CheckList());
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
