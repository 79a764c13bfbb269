// The "normalizer" of tokenizer.json: what happens to text before it is cut into pieces.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/tokenizer/json_fields.h"

namespace spl::tokenizer {

// Immutable; Apply may be called from any thread at once.
class Normalizer {
 public:
  virtual ~Normalizer() = default;
  // REQUIRES: *text is valid UTF-8, and stays so. InvalidArgument: a pattern gives up on this text.
  virtual absl::Status Apply(std::string* text) const = 0;
};

// Sequence, NFC, Prepend, Replace, Strip. InvalidArgument names any other type.
absl::StatusOr<std::unique_ptr<Normalizer>> ParseNormalizer(const JsonField& field);

}  // namespace spl::tokenizer
