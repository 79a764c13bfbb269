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
  std::string text;  // raw: special tokens are written out and must be parsed; empty for kAnswer
};

struct EvalSample {
  std::string id, task;
  int64_t length = 0;  // nominal
  int64_t max_new_tokens = 16;
  std::vector<EvalSegment> segments;
  // One expected text for each place where the model answers: one at the end, or one for each kAnswer segment.
  std::vector<std::string> answers;
  // Where the question of each answer stands in its turn's new text: "begin", "middle" or "end". Empty: the set does
  // not say. [answers.size()]
  std::vector<std::string> positions;
};

// InvalidArgument names file, line and field.
absl::StatusOr<std::vector<EvalSample>> LoadEvalData(const std::string& path);

// The whole file, unpacked when its name ends in .xz.
absl::StatusOr<std::string> ReadMaybeXz(const std::string& path);

}  // namespace spl::cli
