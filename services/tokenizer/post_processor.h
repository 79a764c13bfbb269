// The "post_processor" of tokenizer.json: puts special tokens around the tokens of a text.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "services/base/json_field.h"
#include "services/tokenizer/tokenizer.h"

namespace spl::tokenizer {

class PostProcessor {
 public:
  // Parses TemplateProcessing (its "single" form), ByteLevel (which only moves offsets) and Sequence. InvalidArgument
  // names any other type. A null field: nothing is added.
  static absl::StatusOr<PostProcessor> Parse(const JsonField& field);

  std::vector<TokenId> Apply(std::vector<TokenId> ids) const;

  // All ids that Apply may add, so that the caller can check them against the vocabulary.
  std::vector<TokenId> AddedIds() const;

 private:
  // Ids before and after the text. The reference allows the text to appear twice; Splice does not.
  struct Template {
    std::vector<TokenId> before;
    std::vector<TokenId> after;
  };
  absl::Status ParseInto(const JsonField& field, int depth);
  absl::Status ParseTemplate(const JsonField& field);

  std::vector<Template> templates_;
};

}  // namespace spl::tokenizer
