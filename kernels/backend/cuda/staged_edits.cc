#include "kernels/backend/cuda/staged_edits.h"

#include <algorithm>
#include <bit>

#include "kernels/cuda/cuda_memory.h"

namespace spl::kernels::cuda {
namespace {

constexpr size_t kListsMax = 512;
constexpr size_t kMinEntries = 256;

}  // namespace

// Null: every list is used by this step, so none can be replaced.
StagedEdits::List* StagedEdits::ListFor(uint64_t id) {
  if (const auto it = list_of_.find(id); it != list_of_.end()) return &lists_[it->second];
  size_t at = lists_.size();
  if (at < kListsMax) {
    lists_.emplace_back();
  } else {
    const auto oldest = std::min_element(lists_.begin(), lists_.end(),
                                         [](const List& a, const List& b) { return a.last_step < b.last_step; });
    if (oldest->last_step == step_) return nullptr;
    at = static_cast<size_t>(oldest - lists_.begin());
    list_of_.erase(oldest->id);
  }
  List& list = lists_[at];
  list.id = id;
  list.version = list.size = list.last_step = 0;
  list_of_[id] = at;
  return &list;
}

absl::StatusOr<StagedEdits::Place> StagedEdits::PlaceOf(const SampleRow& row) {
  if (row.edits_id == 0) return Place{};
  List* const list = ListFor(row.edits_id);
  // Within a step, the row that writes a list is not ordered before another row that reads it.
  if (list == nullptr || list->last_step == step_) return Place{};
  Place place;
  const bool is_new = list->last_step == 0;
  if (list->memory == nullptr || list->memory->size() < row.edits.size_bytes()) {
    list->memory.reset();
    auto memory = AllocateDevice(std::bit_ceil(std::max(kMinEntries, 2 * row.edits.size())) * sizeof(TokenEdit));
    if (!memory.ok()) {
      list_of_.erase(list->id);
      list->id = 0;
      return memory.status();
    }
    list->memory = *std::move(memory);
  } else if (!is_new && row.edits_version == list->version && row.edits.size() == list->size) {
    place.is_sent = false;
  } else if (!is_new && row.edits_version == list->version + 1 && row.edits.size() >= list->size &&
             row.edits.size() <= list->size + 1) {
    place.is_sent = false;
    place.changed = row.last_edit;
  }
  place.kept = static_cast<TokenEdit*>(list->memory->data());
  list->version = row.edits_version;
  list->size = row.edits.size();
  list->last_step = step_;
  return place;
}

void StagedEdits::Forget() {
  for (List& list : lists_) list.last_step = 0;
}

}  // namespace spl::kernels::cuda
