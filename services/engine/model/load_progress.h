// Counts how many bytes of a checkpoint have been read while a model is loaded.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "services/engine/model/checkpoint.h"
#include "services/engine/model/weight_source.h"

namespace spl::engine {

// Ranks count from threads of their own. Immutable but for the count.
class LoadProgress {
 public:
  // `report` gets the bytes that are done and those of all tensors of the checkpoint; with several ranks, the mean over
  // them. It is called after each tensor, on the thread that read it, one call at a time. REQUIRES: it is not null.
  LoadProgress(const Checkpoint& checkpoint, int num_ranks,
               std::function<void(uint64_t done_bytes, uint64_t total_bytes)> report);

  // A source that counts a rank's reads of `inner`. A tensor counts in full when its first part has been written, with
  // the scales and zero points beside it; it counts once. The LoadProgress must outlive the source.
  std::unique_ptr<WeightSource> Count(std::unique_ptr<WeightSource> inner);
  // Reports all bytes as done: the model needs no more of them, even if the checkpoint has further tensors.
  void Finish();

 private:
  class CountingSource;
  void Add(uint64_t bytes);

  const int num_ranks_;
  const std::function<void(uint64_t, uint64_t)> report_;
  std::map<std::string, uint64_t> bytes_;  // sizes by the names that a source takes
  uint64_t total_ = 0;
  std::mutex mutex_;   // guards what follows, and calls of report_
  uint64_t done_ = 0;  // over all ranks
};

}  // namespace spl::engine
