// Sends the questions of an evaluation sample to a model, turn by turn, and adds the answers to a report.
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

// Text of earlier answers in the history.
enum class EvalHistory {
  kExpected,   // the expected answer: turns do not depend on each other and are the same for all methods
  kGenerated,  // the model's answer: as in a conversation, a wrong one may mislead the next
};

struct EvalRunOptions {
  EvalHistory history = EvalHistory::kExpected;
  // True: the turns of a sample share a namespace, so that a server finds the KV of earlier turns. False, and always
  // with methods that reuse segments: a request finds no KV of another request, except that of its warm-up.
  bool keep_history_kv = false;
  std::vector<EvalGrouping> groupings;
  std::string answers_file;  // file for every answer as a JSON line; empty: none
};

// One thread at a time.
class EvalRun {
 public:
  EvalRun(TextGenerator& generator, EvalRunOptions options);

  // Asks at every place of the sample at which the model must answer. `other`: the sample whose text is in front of the
  // segments in the warm-up of Provenance::kForeign. Errors are the generator's, and name the sample. InvalidArgument:
  // it needs the other sample's text, and there is none.
  absl::Status Run(const EvalSample& sample, const EvalMethod& method, const EvalSample* other = nullptr);

  // Records in the report why this method has no (more) answers.
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
  // The requests that leave KV of the segments behind.
  std::vector<TextRequest> AloneRequests(const PromptParts& parts, const std::string& namespace_name) const;
  TextRequest TogetherRequest(const PromptParts& parts, const std::string& namespace_name) const;
  std::vector<TextRequest> ForeignRequests(const PromptParts& parts, const std::string& namespace_name) const;
  absl::Status WarmUp(const PromptParts& parts, const EvalMethod& method, const std::string& namespace_name);
  // Returns the model's answer. `history_tokens`: tokens of `parts` that belong to earlier turns.
  absl::StatusOr<std::string> Ask(const EvalSample& sample, size_t place, int64_t history_tokens,
                                  const PromptParts& parts, const EvalMethod& method);
  absl::Status CompareFirstLogits(const EvalPlace& place, const EvalMethod& method, const TextResult& result);

  TextGenerator& generator_;
  const EvalRunOptions options_;
  EvalReport report_;
  // First logits of `exact`, by sample and turn. Empty vectors: the server gives none.
  std::map<std::pair<std::string, int64_t>, std::vector<float>> exact_logits_;
  std::string nonce_;
  int64_t num_namespaces_ = 0;
  std::string session_;         // namespace of the current sample
  std::vector<int32_t> other_;  // the text of `other`; empty without one
  std::ofstream answers_;
};

}  // namespace spl::cli
