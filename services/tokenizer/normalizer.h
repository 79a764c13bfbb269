// The "normalizer" of tokenizer.json: changes the text before it is cut into pieces.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/base/json_field.h"

namespace spl::tokenizer {

// Immutable; any thread.
class Normalizer {
 public:
  virtual ~Normalizer() = default;
  // Normalizes *text in place. REQUIRES: *text is valid UTF-8; the result is, too. InvalidArgument: a pattern exceeds
  // its match limit on this text.
  virtual absl::Status Apply(std::string* text) const = 0;
};

// Parses Sequence, NFC, Prepend, Replace, Strip. InvalidArgument names any other type.
absl::StatusOr<std::unique_ptr<Normalizer>> ParseNormalizer(const JsonField& field);

}  // namespace spl::tokenizer
