// Evaluation sets: JSONL, plain or .xz, one sample a line (docs/data-formats.md).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace spl::cli {

struct EvalSegment {
  enum class Kind { kNew, kReuse, kAnswer };
  Kind kind = Kind::kNew;
  std::string text;  // raw: special tokens are spelled and must be parsed; empty for kAnswer
};

struct EvalSample {
  std::string id, task;
  int64_t length = 0;  // nominal
  int64_t max_new_tokens = 16;
  std::vector<EvalSegment> segments;
  // The expected text of each answer: one at the end, or one for each kAnswer segment.
  std::vector<std::string> answers;
  // [answers.size()]: place of each answer's question in the new text of its turn, "begin", "middle" or "end". Empty:
  // the set does not tell.
  std::vector<std::string> positions;
};

// InvalidArgument names file, line and field.
absl::StatusOr<std::vector<EvalSample>> LoadEvalData(const std::string& path);

// Reads the whole file; unpacks it if its name ends in .xz.
absl::StatusOr<std::string> ReadMaybeXz(const std::string& path);

}  // namespace spl::cli
