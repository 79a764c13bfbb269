#include "services/engine/model/load_progress.h"

#include <set>
#include <utility>

#include "services/base/status.h"

namespace spl::engine {
namespace {

// "x.weight_scale", "x.qweight", "x.scales" and their like are parts of "x.weight".
std::string CountedAs(const std::string& tensor) {
  const size_t dot = tensor.rfind('.');
  if (dot == std::string::npos || tensor.compare(dot, std::string::npos, ".bias") == 0) return tensor;
  return tensor.substr(0, dot) + ".weight";
}

}  // namespace

class LoadProgress::CountingSource final : public WeightSource {
 public:
  CountingSource(LoadProgress& progress, std::unique_ptr<WeightSource> inner)
      : progress_(progress), inner_(std::move(inner)) {}

  bool Contains(const std::string& name) const override { return inner_->Contains(name); }
  absl::StatusOr<MatrixType> TypeOf(const std::string& name, const std::vector<int64_t>& shape) const override {
    return inner_->TypeOf(name, shape);
  }
  absl::Status Write(const MatrixPart& part, void* device, MatrixScales& scales) override {
    SPLICE_RETURN_IF_ERROR(inner_->Write(part, device, scales));
    Count(part.name);
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<float>> Floats(const std::string& name, const std::vector<int64_t>& shape) override {
    auto values = inner_->Floats(name, shape);
    if (values.ok()) Count(name);
    return values;
  }

 private:
  void Count(const std::string& name) {
    if (!counted_.insert(name).second) return;  // an embedding that is the head, too
    if (const auto found = progress_.bytes_.find(name); found != progress_.bytes_.end()) progress_.Add(found->second);
  }

  LoadProgress& progress_;
  const std::unique_ptr<WeightSource> inner_;
  std::set<std::string> counted_;
};

LoadProgress::LoadProgress(const Checkpoint& checkpoint, int num_ranks,
                           std::function<void(uint64_t done_bytes, uint64_t total_bytes)> report)
    : num_ranks_(num_ranks), report_(std::move(report)) {
  for (const auto& file : checkpoint.files()) {
    for (const auto& [name, tensor] : file->tensors()) {
      bytes_[CountedAs(name)] += tensor.bytes;
      total_ += tensor.bytes;
    }
  }
}

std::unique_ptr<WeightSource> LoadProgress::Count(std::unique_ptr<WeightSource> inner) {
  return std::make_unique<CountingSource>(*this, std::move(inner));
}

void LoadProgress::Add(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  done_ += bytes;
  report_(done_ / static_cast<uint64_t>(num_ranks_), total_);
}

void LoadProgress::Finish() {
  const std::lock_guard lock(mutex_);
  report_(total_, total_);
}

}  // namespace spl::engine
