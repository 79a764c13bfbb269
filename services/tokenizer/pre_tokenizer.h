// The "pre_tokenizer" of tokenizer.json: cuts text into pieces. Merges never cross the end of a piece.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/base/json_field.h"

namespace spl::tokenizer {

struct Piece {
  std::string_view text;
  bool at_start = false;  // begins at the start of the whole text (Metaspace's "first")
};

// The pieces of one text. Those that are not a part of the text itself refer to `storage`.
struct Pieces {
  std::vector<Piece> list;
  std::deque<std::string> storage;
};

// One step of the cutting. Immutable; any thread.
class PreTokenizerStep {
 public:
  virtual ~PreTokenizerStep() = default;
  // Appends the pieces of `piece` to `out`.
  virtual absl::Status Cut(const Piece& piece, Pieces* out) const = 0;
};

class PreTokenizer {
 public:
  // Parses Sequence, Split, ByteLevel, Digits, Metaspace, Punctuation, Whitespace, WhitespaceSplit. InvalidArgument
  // names any other type. A null field: the text is not cut.
  static absl::StatusOr<PreTokenizer> Parse(const JsonField& field);

  // True if the vocabulary is spelled in the byte-level alphabet. The last step then leaves the bytes as they are:
  // mapping each piece to characters only to look them up would double the work.
  bool byte_level() const { return byte_level_; }

  // Appends the pieces of `piece`, without empty ones.
  absl::Status Cut(const Piece& piece, Pieces* out) const;

 private:
  absl::Status ParseInto(const JsonField& field, int depth);
  absl::Status ParseByteLevel(const JsonField& field);

  std::vector<std::unique_ptr<PreTokenizerStep>> steps_;
  bool byte_level_ = false;
};

}  // namespace spl::tokenizer
