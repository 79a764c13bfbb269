// Keeps the token edits of sequences (TokenEdit: what was generated, and what the request asks of single tokens) on the
// device between steps. A list travels once as a whole; afterwards only entries that change are sent.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/common/buffer.h"
#include "kernels/sampling/sample_tokens.h"

namespace spl::kernels::cuda {

// Belongs to one session, whose stream orders the writes. Keeps the lists of the sequences that were sampled last, 512
// at most. One thread at a time.
class StagedEdits {
 public:
  struct Place {
    TokenEdit* kept = nullptr;  // device memory of the list; null: it is not kept
    bool is_sent = true;        // the whole list is sent, and the kernel writes it to `kept`
    int32_t changed = -1;       // if not is_sent: the one entry that is sent; -1: none
  };
  // Tells where the edits of `row` are once the kernel of this call has run. A kernel begins with each call of
  // NextStep. Errors are those of allocating device memory.
  absl::StatusOr<Place> PlaceOf(const SampleRow& row);
  void NextStep() { ++step_; }
  // Drops trust in everything that was sent (a step failed): each list is sent as a whole again.
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
