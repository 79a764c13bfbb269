#include "services/engine/runtime/decode_batch.h"

#include <algorithm>

namespace spl::engine {
namespace {

template <typename Sequences>
void InsertByAge(Sequences& sequences, DecodeBatch::Sequence sequence) {
  const auto younger = std::find_if(sequences.begin(), sequences.end(),
                                    [&](const auto& other) { return other->order > sequence->order; });
  sequences.insert(younger, std::move(sequence));
}

}  // namespace

void DecodeBatch::Wait(Sequence sequence) { InsertByAge(waiting_, std::move(sequence)); }

void DecodeBatch::Run(Sequence sequence) { InsertByAge(running_, std::move(sequence)); }

void DecodeBatch::Finish(DecodeSequence& sequence, const absl::Status& status) {
  if (sequence.done) return;
  look_again_ = true;
  sequence.End(status, delivery_);
  if (shared_ != nullptr) shared_->PagesFreed();
}

void DecodeBatch::FinishAll(const absl::Status& status) {
  for (auto& sequence : running_) Finish(*sequence, status);
  for (auto& sequence : waiting_) Finish(*sequence, status);
}

void DecodeBatch::RemoveFinished() {
  const auto done = [](const Sequence& sequence) { return sequence->done; };
  std::erase_if(running_, done);
  std::erase_if(waiting_, done);
}

DecodeCounts DecodeBatch::counts() const {
  DecodeCounts counts{.waiting = waiting_.size()};
  const auto count = [&](const Sequence& sequence) {
    if (sequence->parked == nullptr) return;
    ++counts.parked;
    counts.parked_bytes += sequence->parked->bytes();
  };
  for (const auto& sequence : running_) {
    counts.running += sequence->num_active();
    count(sequence);  // on its way to those that wait
  }
  std::for_each(waiting_.begin(), waiting_.end(), count);
  return counts;
}

}  // namespace spl::engine
