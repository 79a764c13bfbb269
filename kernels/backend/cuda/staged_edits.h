// What sequences have generated and what is asked of their tokens (TokenEdit), kept on the device between steps: a list
// travels once, and then the entries that change.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/common/buffer.h"
#include "kernels/sampling/sample_tokens.h"

namespace spl::kernels::cuda {

// Of one session, whose stream orders what is written. Lists of the sequences that were sampled last are kept.
class StagedEdits {
 public:
  struct Place {
    TokenEdit* kept = nullptr;  // null: this list is not kept
    bool is_sent = true;        // all of it, as the host has it; the kernel writes it to `kept`
    int32_t changed = -1;       // otherwise the entry that is sent; -1: none
  };
  // Where the edits of `row` are once the kernel of this call has run. Every call of NextStep begins a kernel.
  absl::StatusOr<Place> PlaceOf(const SampleRow& row);
  void NextStep() { ++step_; }
  // Nothing that was staged can be relied on.
  void Forget();

 private:
  struct List {
    uint64_t id = 0;
    uint64_t version = 0;
    size_t size = 0;
    uint64_t last_step = 0;
    std::unique_ptr<Buffer> memory;
  };
  List* ListFor(uint64_t id);

  std::vector<List> lists_;
  std::unordered_map<uint64_t, size_t> list_of_;
  uint64_t step_ = 0;
};

}  // namespace spl::kernels::cuda
