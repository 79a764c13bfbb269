// What an evaluation saw: cells of (task, length, method, provenance), as a table, JSON and one HTML page.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "tools/cli/eval_method.h"
#include "tools/cli/text_generator.h"

namespace spl::cli {

struct EvalCell {
  int64_t n = 0, correct = 0;
  // Beside `exact`, where that ran too: the most likely first token, and the cosine of its logits.
  int64_t first_equal = 0, first_compared = 0;
  std::vector<double> cosines;
  std::vector<double> ttft_ms;
  int64_t prompt_tokens = 0, cached = 0, aligned = 0, recomputed = 0, computed = 0, fetched = 0, wire = 0;
};

class EvalReport {
 public:
  void Add(const std::string& task, int64_t length, const EvalMethod& method, const TextResult& result, bool correct);
  // Logits behind the prompt, of the method and of `exact`. REQUIRES: equal, positive sizes.
  void AddFirstLogits(const std::string& task, int64_t length, const EvalMethod& method, std::span<const float> logits,
                      std::span<const float> exact);

  void PrintTable() const;
  nlohmann::json ToJson() const;
  // Self-contained: a table, and for each length and provenance accuracy over time to first token.
  std::string ToHtml(const std::string& title) const;

 private:
  // task, length, reuse label, decode, provenance ("-" for exact)
  using Key = std::tuple<std::string, int64_t, std::string, std::string, std::string>;
  static Key KeyOf(const std::string& task, int64_t length, const EvalMethod& method);
  // The same over the core tasks of a length: those that `exact` answers at 80 % or more. Empty without `exact`.
  std::map<Key, EvalCell> CoreAverages() const;
  std::string Plot(int64_t length, const std::string& provenance) const;

  std::map<Key, EvalCell> cells_;
};

}  // namespace spl::cli
