// Table of what a decode step costs when all of its sequences attend to everything, and when all of them choose tokens
// by packed keys or compact keys (docs/decisions/0016-decode-auto.md).
//
// A dense step takes a + b n + c n L seconds for n sequences of L positions: it is bound by reading weights, and K and
// V. Between measured points this is bilinear, and so is the table's answer. A step that chooses takes time in rounds
// of blocks, so that n sequences are taken to cost what the next larger measured number of them does. Where nothing was
// measured nothing is saved: every error is on the side of dense steps.
#pragma once

#include <cstdint>
#include <vector>

namespace spl::engine {

// Sequences of a step, as far as its cost depends on them.
struct StepLoad {
  int64_t sequences = 0;
  int64_t positions = 0;  // sum over all of them
  StepLoad operator+(const StepLoad& other) const { return {sequences + other.sequences, positions + other.positions}; }
};

// Immutable once it is filled. Any thread may read.
class StepCosts {
 public:
  struct Point {
    int64_t sequences = 0;
    double dense_s = 0;   // a step that attends to everything
    double chosen_s = 0;  // a step that attends to chosen tokens
    double change_s = 0;  // what the first steps that choose take more than later ones
  };
  // Points of one length.
  struct Row {
    int64_t length = 0;         // positions of each sequence
    std::vector<Point> points;  // by number of sequences, ascending; not empty
  };

  StepCosts() = default;  // nothing is ever saved
  // REQUIRES: rows by length, ascending.
  explicit StepCosts(std::vector<Row> rows);

  // The rule for devices that were not measured: sequences choose from 32,768 positions on, if half of a step is paid
  // back that way. It is on the safe side of what was measured: on an H100 with an 8B model one sequence of 16,000
  // positions breaks even, one of 32,000 gains 9 % (docs/results/2026-11-26-packed-keys.md); on a CPU the attention of
  // one sequence of 32K takes a fifth of dense attention (docs/results/2026-11-22-sparse-decoding.md), and steps of
  // four sequences of 10,000 are slower than dense ones.
  static StepCosts BuiltIn();

  // Costs of a step. `measured`: the load lies within the table; otherwise nothing else is set. Lengths count by their
  // mean, because costs are linear in them. A load without sequences costs nothing, and is not measured.
  struct Cost {
    bool measured = false;
    double dense_s = 0, chosen_s = 0, change_s = 0;
    double saved_s() const { return dense_s - chosen_s; }
  };
  Cost At(const StepLoad& load) const;

  const std::vector<Row>& rows() const { return rows_; }
  bool is_built_in() const { return is_built_in_; }

 private:
  static Cost Of(const Row& row, int64_t sequences);

  std::vector<Row> rows_;
  bool is_built_in_ = false;
};

}  // namespace spl::engine
