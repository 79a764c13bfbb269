#include "services/engine/execution/score_memory.h"

#include <algorithm>
#include <bit>
#include <mutex>
#include <utility>
#include <vector>

#include "services/base/status.h"

namespace spl::engine {

struct ScoreMemory::Kept {
  std::mutex mutex;
  std::vector<std::unique_ptr<kernels::Buffer>> buffers;

  // The smallest one with room for `bytes`; null: there is none.
  std::unique_ptr<kernels::Buffer> Find(size_t bytes) {
    const std::scoped_lock lock(mutex);
    auto best = buffers.end();
    for (auto it = buffers.begin(); it != buffers.end(); ++it) {
      if ((*it)->size() >= bytes && (best == buffers.end() || (*it)->size() < (*best)->size())) best = it;
    }
    if (best == buffers.end()) return nullptr;
    std::unique_ptr<kernels::Buffer> found = std::move(*best);
    buffers.erase(best);
    return found;
  }

  // Drops the smallest one where there are too many, so that prompts which grow longer do not leave small ones behind.
  void Keep(std::unique_ptr<kernels::Buffer> buffer) {
    if (buffer->size() > kLargestKept) return;
    std::unique_ptr<kernels::Buffer> dropped;  // freed without the lock
    const std::scoped_lock lock(mutex);
    buffers.push_back(std::move(buffer));
    if (buffers.size() <= kMostKept) return;
    const auto smallest = std::ranges::min_element(buffers, {}, [](const auto& kept) { return kept->size(); });
    dropped = std::move(*smallest);
    buffers.erase(smallest);
  }
};

class ScoreMemory::Scores final : public kernels::Buffer {
 public:
  Scores(std::unique_ptr<kernels::Buffer> memory, size_t bytes, std::weak_ptr<Kept> kept)
      : memory_(std::move(memory)), bytes_(bytes), kept_(std::move(kept)) {}
  ~Scores() override {
    if (const std::shared_ptr<Kept> kept = kept_.lock()) kept->Keep(std::move(memory_));
  }
  void* data() const override { return memory_->data(); }
  size_t size() const override { return bytes_; }

 private:
  std::unique_ptr<kernels::Buffer> memory_;
  const size_t bytes_;
  const std::weak_ptr<Kept> kept_;
};

ScoreMemory::ScoreMemory() : kept_(std::make_shared<Kept>()) {}

absl::StatusOr<std::unique_ptr<kernels::Buffer>> ScoreMemory::Take(const kernels::Backend& backend,
                                                                   kernels::Session& session, int64_t count) {
  const size_t bytes = sizeof(float) * static_cast<size_t>(std::max<int64_t>(count, 1));
  std::unique_ptr<kernels::Buffer> memory = kept_->Find(bytes);
  if (memory == nullptr) {
    SPLICE_ASSIGN_OR_RETURN(memory, backend.Allocate(std::bit_ceil(std::max<size_t>(bytes, 4096))));
  } else {
    SPLICE_RETURN_IF_ERROR(session.Zero(memory->data(), bytes));
  }
  return std::make_unique<Scores>(std::move(memory), bytes, kept_);
}

}  // namespace spl::engine
