// CudaSession's staging of a batch: what changes from pass to pass travels to where recorded steps read it.
#include <algorithm>
#include <bit>

#include "absl/strings/str_cat.h"
#include "kernels/backend/cuda/cuda_session.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/cuda_status.h"

namespace spl::kernels::cuda {
namespace {

constexpr int32_t kMinKvBucket = 1024;

// The length for which a recorded step of sequences up to `longest` is sized: eight sizes per power of two, so that a
// step just above one is not launched for twice its length.
int32_t KvBucket(int32_t longest) {
  longest = std::max(longest, 1);
  const auto octave = static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(longest)));
  const int32_t step = std::max(octave / 16, kMinKvBucket);
  return (longest + step - 1) / step * step;
}

constexpr size_t kSmallRowArray = 32 << 10;  // bytes that are cheaper to copy than to leave out

}  // namespace

absl::StatusOr<int32_t> CudaSession::SlotFor(uint64_t kv_id, std::span<const BatchSequence> sequences) {
  if (const auto it = slot_of_.find(kv_id); it != slot_of_.end()) {
    slots_[static_cast<size_t>(it->second)].last_used = pass_;
    return it->second;
  }
  // The least recently used; a slot that this pass uses has last_used == pass_.
  const auto slot = std::min_element(slots_.begin(), slots_.end(),
                                     [](const Slot& a, const Slot& b) { return a.last_used < b.last_used; });
  if (slot->last_used == pass_)
    return absl::ResourceExhaustedError(
        absl::StrCat("cuda: ", sequences.size(), " sequences in one pass, at most ", slots_.size(), " fit"));
  if (slot->kv_id != 0) slot_of_.erase(slot->kv_id);
  *slot = {.kv_id = kv_id, .num_pages = 0, .last_used = pass_};
  const int32_t index = static_cast<int32_t>(slot - slots_.begin());
  slot_of_[kv_id] = index;
  return index;
}

size_t CudaSession::NewPagesBytes(int32_t num_pages, int32_t known) const {
  const size_t num_streams = static_cast<size_t>(options_.num_layers) * options_.num_kv_heads;
  return num_streams * static_cast<size_t>(std::max(num_pages - known, 0)) * sizeof(int32_t);
}

// Copies the new pages of this rank's heads in all layers, by way of `staged`, NewPagesBytes of page-locked memory:
// pages [known, num_pages) of `tables`; `known` is num_pages then. A shorter table is filled up with kNoPage.
absl::Status CudaSession::CopyNewPages(std::span<const std::vector<int32_t>> tables, int32_t num_pages, int32_t* to,
                                       int64_t stride, int32_t& known, std::byte* staged) {
  if (num_pages <= known) return absl::OkStatus();
  const auto added = static_cast<size_t>(num_pages - known);
  const size_t num_streams = static_cast<size_t>(options_.num_layers) * options_.num_kv_heads;
  const size_t row_bytes = added * sizeof(int32_t);
  auto* row = reinterpret_cast<int32_t*>(staged);
  for (int32_t layer = 0; layer < options_.num_layers; ++layer) {
    for (int32_t head = 0; head < options_.num_kv_heads; ++head, row += added) {
      const std::vector<int32_t>& pages =
          tables[static_cast<size_t>(layer * options_.heads_in_tables() + options_.first_kv_head + head)];
      // Kernels know nothing of other ranks' pages: their pool starts with page 0.
      for (size_t i = 0; i < added; ++i) {
        const size_t at = static_cast<size_t>(known) + i;
        const int32_t page = at < pages.size() ? pages[at] : kNoPage;
        row[i] = page == kNoPage ? kNoPage : page - options_.first_page;
      }
    }
  }
  SPLICE_CUDA_RETURN_IF_ERROR(cudaMemcpy2DAsync(to + known, static_cast<size_t>(stride) * sizeof(int32_t), staged,
                                                row_bytes, row_bytes, num_streams, cudaMemcpyHostToDevice, stream_),
                              "copying page tables");
  known = num_pages;
  return absl::OkStatus();
}

// Brings the device's copy of every page table up to date: only pages added since the last pass travel.
absl::Status CudaSession::StageTables(const BatchArgs& batch, std::vector<int64_t>& offsets) {
  const int64_t slot_stride = batch_.layer_stride * options_.num_layers;
  size_t bytes = 0;
  for (const BatchSequence& sequence : batch.sequences) {
    auto slot_index = SlotFor(sequence.kv_id, batch.sequences);
    if (!slot_index.ok()) return slot_index.status();
    Slot& slot = slots_[static_cast<size_t>(*slot_index)];
    offsets.push_back(*slot_index * slot_stride);
    const size_t table_heads = static_cast<size_t>(options_.heads_in_tables());
    if (sequence.page_tables.size() != options_.num_layers * table_heads)
      return absl::InvalidArgumentError(absl::StrCat("cuda: a sequence with ", sequence.page_tables.size(),
                                                     " head streams, the model has ",
                                                     options_.num_layers * table_heads));
    const int32_t num_pages = static_cast<int32_t>(sequence.page_tables[0].size());
    if (num_pages > batch_.head_stride)
      return absl::ResourceExhaustedError(
          absl::StrCat("cuda: a sequence of ", num_pages, " pages a head, the tables hold ", batch_.head_stride));
    bytes += NewPagesBytes(num_pages, slot.num_pages);
  }
  if (bytes == 0) return absl::OkStatus();
  auto pinned = Pinned(bytes);
  if (!pinned.ok()) return pinned.status();
  std::byte* staged = *pinned;
  for (size_t s = 0; s < batch.sequences.size(); ++s) {
    Slot& slot = slots_[static_cast<size_t>(offsets[s] / slot_stride)];
    const auto num_pages = static_cast<int32_t>(batch.sequences[s].page_tables[0].size());
    const size_t own = NewPagesBytes(num_pages, slot.num_pages);
    int32_t* to = static_cast<int32_t*>(tables_->data()) + offsets[s];
    const absl::Status copied =
        CopyNewPages(batch.sequences[s].page_tables, num_pages, to, batch_.head_stride, slot.num_pages, staged);
    if (!copied.ok()) return copied;
    staged += own;
  }
  return PinnedUsed();
}

bool CudaSession::HasPlan(uint64_t kv_id, uint64_t plan_key) const {
  const auto it = slot_of_.find(kv_id);
  if (it == slot_of_.end()) return false;
  const Slot& slot = slots_[static_cast<size_t>(it->second)];
  return slot.has_plan && slot.plan_key == plan_key;
}

// Visibility stays on the device beside the page tables of a sequence, so it travels once. Every sequence has its slot.
absl::Status CudaSession::StagePlans(const BatchArgs& batch) {
  const size_t plan_size = static_cast<size_t>(options_.num_layers) * static_cast<size_t>(options_.num_kv_heads);
  if (plans_ == nullptr) {
    auto memory = AllocateDevice(slots_.size() * plan_size * sizeof(Band));
    if (!memory.ok()) return memory.status();
    plans_ = *std::move(memory);
    batch_.plans = static_cast<const Band*>(plans_->data());
  }
  std::vector<const BatchSequence*> missing;
  for (const BatchSequence& sequence : batch.sequences) {
    if (HasPlan(sequence.kv_id, sequence.plan_key)) continue;
    if (sequence.plan.size() != plan_size)
      return absl::InvalidArgumentError(
          absl::StrCat("cuda: a plan for ", sequence.plan.size(), " head streams, the session has ", plan_size));
    for (const HeadVisibility& v : sequence.plan) {
      if (v.rule != VisibilityRule::kFull && v.rule != VisibilityRule::kBand && v.rule != VisibilityRule::kSelected &&
          v.rule != VisibilityRule::kElsewhere)
        return absl::UnimplementedError("cuda: attention over blocks or token lists");
    }
    missing.push_back(&sequence);
  }
  if (missing.empty()) return absl::OkStatus();
  auto pinned = Pinned(missing.size() * plan_size * sizeof(Band));
  if (!pinned.ok()) return pinned.status();
  Band* to = reinterpret_cast<Band*>(*pinned);
  for (const BatchSequence* sequence : missing) {
    const int32_t index = slot_of_.at(sequence->kv_id);
    for (size_t i = 0; i < plan_size; ++i) {
      const HeadVisibility& v = sequence->plan[i];
      to[i] = v.rule == VisibilityRule::kBand        ? Band{v.num_sinks, std::min(v.window, kFullWindow)}
              : v.rule == VisibilityRule::kSelected  ? Band{0, kSelectedWindow}
              : v.rule == VisibilityRule::kElsewhere ? Band{0, kElsewhereWindow}
                                                     : Band{0, kFullWindow};
    }
    SPLICE_CUDA_RETURN_IF_ERROR(
        cudaMemcpyAsync(static_cast<Band*>(plans_->data()) + static_cast<size_t>(index) * plan_size, to,
                        plan_size * sizeof(Band), cudaMemcpyHostToDevice, stream_),
        "copying what heads see");
    to += plan_size;
    Slot& slot = slots_[static_cast<size_t>(index)];
    slot.has_plan = true;
    slot.plan_key = sequence->plan_key;
  }
  return PinnedUsed();
}

// Compact pages of all sequences travel as pages do: those added since the last step.
absl::Status CudaSession::StageCompactTables(const BatchArgs& batch) {
  const size_t table_heads = options_.num_layers * static_cast<size_t>(options_.heads_in_tables());
  const int64_t slot_stride = batch_.compact_stride * options_.num_kv_heads * options_.num_layers;
  struct Table {
    std::span<const std::vector<int32_t>> pages;
    int32_t num_pages, slot;
  };
  std::vector<Table> grown;
  size_t bytes = 0;
  for (const BatchSequence& sequence : batch.sequences) {
    if (sequence.selection == nullptr) continue;
    const auto tables = sequence.selection->compact_tables;
    if (tables.size() != table_heads)
      return absl::InvalidArgumentError(
          absl::StrCat("cuda: compact_tables of ", tables.size(), " head streams, the model has ", table_heads));
    // Copies at least the entry that says that a stream has no pages, over an earlier sequence's entries in the slot.
    size_t num_pages = 1;
    for (const std::vector<int32_t>& pages : tables) num_pages = std::max(num_pages, pages.size());
    if (static_cast<int64_t>(num_pages) > batch_.compact_stride)
      return absl::ResourceExhaustedError(absl::StrCat(
          "cuda: a sequence of ", num_pages, " compact pages a head, the tables hold ", batch_.compact_stride));
    const int32_t slot = slot_of_.at(sequence.kv_id);
    const size_t own =
        NewPagesBytes(static_cast<int32_t>(num_pages), slots_[static_cast<size_t>(slot)].num_compact_pages);
    if (own == 0) continue;
    bytes += own;
    grown.push_back({tables, static_cast<int32_t>(num_pages), slot});
  }
  if (bytes == 0) return absl::OkStatus();
  auto pinned = Pinned(bytes);
  if (!pinned.ok()) return pinned.status();
  std::byte* staged = *pinned;
  for (const Table& table : grown) {
    int32_t& known = slots_[static_cast<size_t>(table.slot)].num_compact_pages;
    const size_t own = NewPagesBytes(table.num_pages, known);
    const absl::Status copied = CopyNewPages(table.pages, table.num_pages,
                                             static_cast<int32_t*>(compact_tables_->data()) + table.slot * slot_stride,
                                             batch_.compact_stride, known, staged);
    if (!copied.ok()) return copied;
    staged += own;
  }
  return PinnedUsed();
}

namespace {

// `compact_offset`: that of the sequence's tables.
StagedSequence StagedOf(const SequenceSelection& selection, int64_t compact_offset) {
  return {.dims = selection.dims,
          .compact_offset = compact_offset,
          .budget = selection.budget,
          .recent = selection.recent,
          .list_begin = selection.list_begin,
          .list_pages = selection.list_pages,
          .first_fresh = selection.first_fresh,
          .hot = selection.hot};
}

StagedStep StagedOf(const LayerSelection& step, int32_t plan) {
  return {.flags = (step.selects ? StagedStep::kSelects : 0) | (step.refresh ? StagedStep::kRefresh : 0) |
                   (step.first ? StagedStep::kFirst : 0) | (step.parity != 0 ? StagedStep::kParity : 0) |
                   (step.records ? StagedStep::kRecords : 0) | (step.listed ? StagedStep::kListed : 0) |
                   StagedStep::PlanBit(plan),
          .compact_len = step.compact_len,
          .num_sinks = step.num_sinks,
          .window = step.window};
}

}  // namespace

// Every sequence has its slot. Sequences without a selection select nowhere.
absl::Status CudaSession::StageSelection(const BatchArgs& batch) {
  const size_t num_layers = static_cast<size_t>(options_.num_layers);
  const size_t half = Aligned<StagedSequence>(slots_.size()) + Aligned<StagedStep>(num_layers * slots_.size());
  if (selection_ == nullptr) {
    auto memory = AllocateDevice(2 * half);
    if (!memory.ok()) return memory.status();
    // A compact page has the keys of at least two pages, or the listed positions of at least eight; then there are
    // queries, some hundred a page.
    constexpr int64_t kQueryPages = 64;
    const int64_t stride = batch_.head_stride / 2 + 1 + batch_.head_stride / 8 + 1 + kQueryPages;
    auto tables = AllocateDevice(slots_.size() * num_layers * static_cast<size_t>(options_.num_kv_heads * stride) *
                                 sizeof(int32_t));
    if (!tables.ok()) return tables.status();
    selection_ = *std::move(memory);
    compact_tables_ = *std::move(tables);
    auto* base = static_cast<std::byte*>(selection_->data());
    batch_.selecting = reinterpret_cast<const StagedSequence*>(base);
    batch_.selection_steps = reinterpret_cast<const StagedStep*>(base + Aligned<StagedSequence>(slots_.size()));
    batch_.outer_selecting = reinterpret_cast<const StagedSequence*>(base + half);
    batch_.outer_steps = reinterpret_cast<const StagedStep*>(base + half + Aligned<StagedSequence>(slots_.size()));
    batch_.compact_tables = static_cast<const int32_t*>(compact_tables_->data());
    batch_.compact_stride = stride;
    batch_.steps_stride = static_cast<int64_t>(slots_.size());
  }
  const int64_t slot_stride = batch_.compact_stride * options_.num_kv_heads * options_.num_layers;
  for (const BatchSequence& sequence : batch.sequences) {
    if (sequence.selection == nullptr) continue;
    const SequenceSelection* const outer = sequence.selection->outer;
    if (sequence.selection->layers.size() != num_layers || (outer != nullptr && outer->layers.size() != num_layers))
      return absl::InvalidArgumentError(absl::StrCat("cuda: a selection with steps of ",
                                                     sequence.selection->layers.size(), " layers, the model has ",
                                                     num_layers));
  }
  if (absl::Status s = StageCompactTables(batch); !s.ok()) return s;
  // Outer choices follow; they are copied in steps that have some.
  const bool any_outer = std::any_of(batch.sequences.begin(), batch.sequences.end(), [](const BatchSequence& s) {
    return s.selection != nullptr && s.selection->outer != nullptr;
  });
  const size_t bytes = any_outer ? 2 * half : half;
  auto pinned = Pinned(bytes);
  if (!pinned.ok()) return pinned.status();
  const auto stage = [&](std::byte* base, bool outer) {
    auto* staged = reinterpret_cast<StagedSequence*>(base);
    auto* steps = reinterpret_cast<StagedStep*>(base + Aligned<StagedSequence>(slots_.size()));
    std::fill_n(steps, num_layers * slots_.size(), StagedStep{});
    for (size_t s = 0; s < batch.sequences.size(); ++s) {
      const SequenceSelection* selection = batch.sequences[s].selection;
      if (selection != nullptr && outer) selection = selection->outer;
      if (selection == nullptr) {
        staged[s] = {};
        continue;
      }
      staged[s] = StagedOf(*selection, slot_of_.at(batch.sequences[s].kv_id) * slot_stride);
      for (size_t layer = 0; layer < num_layers; ++layer)
        steps[layer * slots_.size() + s] = StagedOf(selection->layers[layer], selection->plan);
    }
  };
  stage(*pinned, false);
  if (any_outer) stage(*pinned + half, true);
  SPLICE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(selection_->data(), *pinned, bytes, cudaMemcpyHostToDevice, stream_),
                              "copying what layers choose");
  return PinnedUsed();
}

absl::Status CudaSession::Stage(const BatchArgs& batch) {
  SPLICE_CUDA_RETURN_IF_ERROR(cudaSetDevice(device_), "choosing the GPU");
  const size_t rows = batch.tokens.size(), sequences = batch.sequences.size();
  if (rows > static_cast<size_t>(options_.max_rows) || sequences > slots_.size())
    return absl::ResourceExhaustedError(absl::StrCat("cuda: a pass of ", rows, " rows and ", sequences,
                                                     " sequences; at most ", options_.max_rows, " and ", slots_.size(),
                                                     " fit"));
  ++pass_;
  std::vector<int64_t> offsets;
  offsets.reserve(sequences);
  if (absl::Status s = StageTables(batch, offsets); !s.ok()) return s;
  if (batch.staged_plans) {
    if (absl::Status s = StagePlans(batch); !s.ok()) return s;
  }
  batch_.selects = std::any_of(batch.sequences.begin(), batch.sequences.end(),
                               [](const BatchSequence& s) { return s.selection != nullptr; });
  batch_.listed = std::any_of(batch.sequences.begin(), batch.sequences.end(), [](const BatchSequence& s) {
    return s.selection != nullptr && std::any_of(s.selection->layers.begin(), s.selection->layers.end(),
                                                 [](const LayerSelection& layer) { return layer.listed; });
  });
  if (batch_.selects) {
    if (absl::Status s = StageSelection(batch); !s.ok()) return s;
  }

  auto pinned = Pinned(batch_memory_->size());
  if (!pinned.ok()) return pinned.status();
  std::byte* const base = static_cast<std::byte*>(batch_memory_->data());
  const auto host = [&](const auto* device) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(device)>>;
    return reinterpret_cast<T*>(*pinned + (reinterpret_cast<const std::byte*>(device) - base));
  };
  std::copy(batch.tokens.begin(), batch.tokens.end(), host(batch_.tokens));
  std::copy(batch.positions.begin(), batch.positions.end(), host(batch_.positions));
  batch_.has_angles = !batch.angles.empty();
  std::copy(batch.angles.begin(), batch.angles.end(), host(batch_.angles));
  int32_t* row_sequence = host(batch_.row_sequence);
  int32_t* row_begin = host(batch_.row_begin);
  int32_t* kv_len = host(batch_.kv_len);
  int32_t longest = 0;
  for (size_t s = 0; s < sequences; ++s) {
    const BatchSequence& sequence = batch.sequences[s];
    row_begin[s] = sequence.row_begin;
    kv_len[s] = sequence.kv_len;
    longest = std::max(longest, sequence.kv_len);
    std::fill(row_sequence + sequence.row_begin, row_sequence + sequence.row_end, static_cast<int32_t>(s));
  }
  row_begin[sequences] = static_cast<int32_t>(rows);
  std::copy(offsets.begin(), offsets.end(), host(batch_.table_offset));
  int64_t* plan_offset = host(batch_.plan_offset);
  for (size_t s = 0; s < sequences; ++s) plan_offset[s] = offsets[s] / batch_.head_stride;
  // Tokens, positions and sequences of rows come first. Where there is room for many more rows than this batch has only
  // its own travel.
  const size_t row_array = Aligned<int32_t>(static_cast<size_t>(std::max(options_.max_rows, 1)));
  size_t rest = 0;
  if (row_array > kSmallRowArray) {
    SPLICE_CUDA_RETURN_IF_ERROR(cudaMemcpy2DAsync(base, row_array, *pinned, row_array, rows * sizeof(int32_t), 3,
                                                  cudaMemcpyHostToDevice, stream_),
                                "copying the batch's rows");
    rest = 3 * row_array;
  }
  SPLICE_CUDA_RETURN_IF_ERROR(
      cudaMemcpyAsync(base + rest, *pinned + rest, batch_memory_->size() - rest, cudaMemcpyHostToDevice, stream_),
      "copying the batch");
  if (absl::Status s = PinnedUsed(); !s.ok()) return s;
  batch_.num_rows = static_cast<int32_t>(rows);
  batch_.num_sequences = static_cast<int32_t>(sequences);
  batch_.max_kv_len = KvBucket(longest);
  return absl::OkStatus();
}

}  // namespace spl::kernels::cuda
