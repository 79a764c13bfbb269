// Tells which steps of a sequence with the method `adaptive` chose tokens.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace spl::engine {

// The step that gave a token.
enum class StepKind : uint8_t {
  kFixed,   // the method leaves nothing open
  kDense,   // attended to everything
  kChosen,  // attended to chosen tokens
};

struct StepChoice {
  StepKind kind = StepKind::kFixed;
  // If the step tells what the chosen tokens hold (runtime/mass_guard.h): KV heads of layers that fell below the floor,
  // and the least share of a head.
  int32_t guarded_heads = 0;
  std::optional<double> least_mass = std::nullopt;
};

struct DecodeChoiceReport {
  int64_t dense_tokens = 0;   // from steps that attended to everything
  int64_t chosen_tokens = 0;  // from steps that attended to chosen tokens
  int32_t changes = 0;        // from one kind of step to the other, over all continuations
  int32_t guarded_heads = 0;
  std::optional<double> least_mass;  // nullopt: none is known
  bool empty() const { return dense_tokens + chosen_tokens == 0; }
};

// Counts the tokens of one sequence. One thread at a time.
class DecodeChoiceCounter {
 public:
  // A token of continuation `fork`, in the order of steps.
  void Add(int32_t fork, const StepChoice& step) {
    const StepKind kind = step.kind;
    if (kind == StepKind::kFixed) return;
    report_.guarded_heads += step.guarded_heads;
    if (step.least_mass.has_value())
      report_.least_mass = std::min(*step.least_mass, report_.least_mass.value_or(*step.least_mass));
    last_.resize(std::max(last_.size(), static_cast<size_t>(fork) + 1), StepKind::kFixed);
    StepKind& last = last_[fork];
    if (last != StepKind::kFixed && last != kind) ++report_.changes;
    last = kind;
    ++(kind == StepKind::kDense ? report_.dense_tokens : report_.chosen_tokens);
  }
  const DecodeChoiceReport& report() const { return report_; }

 private:
  DecodeChoiceReport report_;
  std::vector<StepKind> last_;  // by continuation
};

}  // namespace spl::engine
