// Asks a model what an evaluation sample asks, turn by turn, and gives the answers to a report.
#pragma once

#include <cstdint>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tools/cli/eval_data.h"
#include "tools/cli/eval_method.h"
#include "tools/cli/eval_report.h"
#include "tools/cli/text_generator.h"

namespace spl::cli {

// What stands in the history where the model has answered.
enum class EvalHistory {
  kExpected,   // the expected answer: turns are independent of each other, and the same for all methods
  kGenerated,  // what it did answer: a wrong answer may lead the next one astray, as in a conversation
};

struct EvalRunOptions {
  EvalHistory history = EvalHistory::kExpected;
  // The turns of a sample share a namespace, so that a server finds the KV of the turns before. Otherwise, and with
  // methods that reuse segments always, no request finds what another has left but for its warm-up.
  bool keep_history_kv = false;
  std::vector<EvalGrouping> groupings;
  std::string answers_file;  // every answer as a JSON line; empty: none
};

// One thread at a time.
class EvalRun {
 public:
  EvalRun(TextGenerator& generator, EvalRunOptions options);

  // Every place where the sample wants an answer. Errors of the generator name the sample.
  absl::Status Run(const EvalSample& sample, const EvalMethod& method);

  // The report says why there are no (more) answers of this method.
  void Refuse(const EvalMethod& method, const absl::Status& why) { report_.Refuse(method, why.ToString()); }
  const EvalReport& report() const { return report_; }

 private:
  struct Part {
    std::vector<int32_t> ids;
    bool reusable = false;
  };
  using PromptParts = std::vector<Part>;

  static void Append(TextRequest& request, const Part& part);
  TextRequest NewRequest(const std::string& namespace_name) const;
  absl::Status WarmUp(const PromptParts& parts, const EvalMethod& method, const std::string& namespace_name);
  // Gives the answer; `history_tokens` of `parts` are of the turns before.
  absl::StatusOr<std::string> Ask(const EvalSample& sample, size_t place, int64_t history_tokens,
                                  const PromptParts& parts, const EvalMethod& method);
  absl::Status CompareFirstLogits(const EvalPlace& place, const EvalMethod& method, const TextResult& result);

  TextGenerator& generator_;
  const EvalRunOptions options_;
  EvalReport report_;
  // Of `exact`, by sample and turn; empty vectors: the server gives none.
  std::map<std::pair<std::string, int64_t>, std::vector<float>> exact_logits_;
  std::string nonce_;
  int64_t num_namespaces_ = 0;
  std::string session_;  // namespace of the sample that runs
  std::ofstream answers_;
};

}  // namespace spl::cli
