#include "kernels/backend/cuda/cuda_session.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/cuda_status.h"

namespace spl::kernels::cuda {
namespace {

constexpr size_t kMaxRecorded = 256;

class EventFence final : public Fence {
 public:
  explicit EventFence(cudaEvent_t event) : event_(event) {}
  ~EventFence() override { (void)cudaEventDestroy(event_); }
  absl::Status Wait() const override { return ToStatus(cudaEventSynchronize(event_), "waiting for the device"); }
  cudaEvent_t event() const { return event_; }

 private:
  const cudaEvent_t event_;
};

// An event that could not be recorded: waiting for it returns the error.
class FailedFence final : public Fence {
 public:
  explicit FailedFence(absl::Status status) : status_(std::move(status)) {}
  absl::Status Wait() const override { return status_; }

 private:
  const absl::Status status_;
};

// Gives its memory back when it has been taken.
class PinnedCopy final : public HostCopy {
 public:
  PinnedCopy(std::unique_ptr<Buffer> memory, std::vector<std::unique_ptr<Buffer>>& home)
      : memory_(std::move(memory)), home_(home) {}
  ~PinnedCopy() override {
    if (copied_ != nullptr) (void)copied_->Wait();  // the device writes no memory that others have
    home_.push_back(std::move(memory_));
  }
  absl::Status Begin(const void* device, size_t bytes, cudaStream_t stream) {
    SPLICE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(memory_->data(), device, bytes, cudaMemcpyDeviceToHost, stream),
                                "reading results back");
    copied_ = RecordEvent(stream, Waiting::kSpins);
    return absl::OkStatus();
  }
  absl::StatusOr<const void*> Wait() override {
    if (absl::Status s = copied_->Wait(); !s.ok()) return s;
    return memory_->data();
  }

 private:
  std::unique_ptr<Buffer> memory_;
  std::vector<std::unique_ptr<Buffer>>& home_;
  std::shared_ptr<const Fence> copied_;
};

}  // namespace

std::shared_ptr<const Fence> RecordEvent(cudaStream_t stream, Waiting waiting) {
  cudaEvent_t event = nullptr;
  const unsigned sleeps = waiting == Waiting::kSleeps ? cudaEventBlockingSync : cudaEventDefault;
  cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming | sleeps);
  if (error == cudaSuccess) error = cudaEventRecord(event, stream);
  if (error == cudaSuccess) return std::make_shared<EventFence>(event);
  if (event != nullptr) (void)cudaEventDestroy(event);
  return std::make_shared<FailedFence>(ToStatus(error, "recording an event"));
}

absl::Status WaitOnDevice(cudaStream_t stream, const Fence& fence) {
  for (const auto& one : fence.joined()) {
    if (absl::Status s = WaitOnDevice(stream, *one); !s.ok()) return s;
  }
  if (!fence.joined().empty()) return absl::OkStatus();
  const auto* const point = dynamic_cast<const EventFence*>(&fence);
  if (point == nullptr) return fence.Wait();
  return ToStatus(cudaStreamWaitEvent(stream, point->event(), 0), "waiting for the device");
}

absl::StatusOr<std::unique_ptr<Session>> CudaSession::Create(int device, const SessionOptions& options) {
  auto session = std::unique_ptr<CudaSession>(new CudaSession(device, options));
  if (absl::Status s = session->Init(); !s.ok()) return s;
  return std::unique_ptr<Session>(std::move(session));
}

absl::Status CudaSession::Init() {
  SPLICE_CUDA_RETURN_IF_ERROR(cudaSetDevice(device_), "choosing the GPU");
  SPLICE_CUDA_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
  SPLICE_CUDA_RETURN_IF_ERROR(cublasLtCreate(&cublas_), "creating a handle");
  auto workspace = AllocateDevice(kGemmWorkspaceBytes);
  if (!workspace.ok()) return workspace.status();
  gemm_workspace_ = *std::move(workspace);

  const size_t rows = static_cast<size_t>(std::max(options_.max_rows, 1));
  const size_t sequences = static_cast<size_t>(std::max(options_.max_sequences, 1));
  // One block, filled by one copy a pass: tokens, positions, angles, row_sequence, row_begin, kv_len, table_offset,
  // plan_offset.
  const size_t total = 4 * Aligned<int32_t>(rows) + Aligned<int32_t>(sequences + 1) + Aligned<int32_t>(sequences) +
                       2 * Aligned<int64_t>(sequences);
  auto memory = AllocateDevice(total);
  if (!memory.ok()) return memory.status();
  batch_memory_ = *std::move(memory);
  std::byte* at = static_cast<std::byte*>(batch_memory_->data());
  const auto take = [&](size_t bytes) {
    std::byte* p = at;
    at += bytes;
    return p;
  };
  batch_.tokens = reinterpret_cast<const int32_t*>(take(Aligned<int32_t>(rows)));
  batch_.positions = reinterpret_cast<const int32_t*>(take(Aligned<int32_t>(rows)));
  batch_.angles = reinterpret_cast<const int32_t*>(take(Aligned<int32_t>(rows)));
  batch_.row_sequence = reinterpret_cast<const int32_t*>(take(Aligned<int32_t>(rows)));
  batch_.row_begin = reinterpret_cast<const int32_t*>(take(Aligned<int32_t>(sequences + 1)));
  batch_.kv_len = reinterpret_cast<const int32_t*>(take(Aligned<int32_t>(sequences)));
  batch_.table_offset = reinterpret_cast<const int64_t*>(take(Aligned<int64_t>(sequences)));
  batch_.plan_offset = reinterpret_cast<const int64_t*>(take(Aligned<int64_t>(sequences)));

  auto ids = AllocateDevice(rows * sizeof(int32_t));
  if (!ids.ok()) return ids.status();
  ids_ = *std::move(ids);

  batch_.head_stride = std::max(options_.max_pages_per_stream, 1);
  batch_.layer_stride = batch_.head_stride * options_.num_kv_heads;
  slots_.resize(sequences);
  const size_t table_bytes =
      sequences * static_cast<size_t>(batch_.layer_stride) * options_.num_layers * sizeof(int32_t);
  auto tables = AllocateDevice(table_bytes);
  if (!tables.ok()) return tables.status();
  tables_ = *std::move(tables);
  batch_.page_tables = static_cast<const int32_t*>(tables_->data());
  for (Staging& staging : staging_)
    SPLICE_CUDA_RETURN_IF_ERROR(cudaEventCreateWithFlags(&staging.copied, cudaEventDisableTiming), "creating an event");
  context_ = {.session = this};
  return absl::OkStatus();
}

CudaSession::~CudaSession() {
  (void)cudaSetDevice(device_);
  if (stream_ != nullptr) (void)cudaStreamSynchronize(stream_);
  for (auto& [key, step] : steps_) {
    if (step.exec != nullptr) (void)cudaGraphExecDestroy(step.exec);
  }
  for (Staging& staging : staging_) {
    if (staging.copied != nullptr) (void)cudaEventDestroy(staging.copied);
  }
  if (cublas_ != nullptr) (void)cublasLtDestroy(cublas_);
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
}

// The next place whose copy has ended and whose memory is large enough, so that the few large tables of long prompts do
// not make every place as large, one after the other: page-locking what a prompt of 32,768 tokens stages takes longer
// than copying it. Else one whose copy has ended, else the next one.
size_t CudaSession::StagingFor(size_t bytes) {
  const size_t next = (current_staging_ + 1) % kStagingPlaces;
  size_t smaller = kStagingPlaces;
  for (size_t i = 0; i < kStagingPlaces; ++i) {
    const size_t place = (next + i) % kStagingPlaces;
    Staging& staging = staging_[place];
    if (staging.in_use) {
      staging.in_use = cudaEventQuery(staging.copied) != cudaSuccess;
      (void)cudaGetLastError();  // "not ready" is no error here
    }
    if (staging.in_use) continue;
    if (staging.memory != nullptr && staging.memory->size() >= bytes) return place;
    if (smaller == kStagingPlaces) smaller = place;
  }
  return smaller < kStagingPlaces ? smaller : next;
}

absl::StatusOr<std::byte*> CudaSession::Pinned(size_t bytes) {
  current_staging_ = StagingFor(bytes);
  Staging& staging = staging_[current_staging_];
  if (staging.in_use) SPLICE_CUDA_RETURN_IF_ERROR(cudaEventSynchronize(staging.copied), "waiting for a staging copy");
  staging.in_use = false;
  if (staging.memory == nullptr || staging.memory->size() < bytes) {
    staging.memory.reset();
    auto memory = AllocatePinned(std::bit_ceil(std::max<size_t>(bytes, 64 << 10)));
    if (!memory.ok()) return memory.status();
    staging.memory = *std::move(memory);
  }
  return static_cast<std::byte*>(staging.memory->data());
}

absl::Status CudaSession::PinnedUsed() {
  Staging& staging = staging_[current_staging_];
  SPLICE_CUDA_RETURN_IF_ERROR(cudaEventRecord(staging.copied, stream_), "recording a staging copy");
  staging.in_use = true;
  return absl::OkStatus();
}

// Drops the quarter of the table that was used longest ago, so that its wait for the device is rare. The steps of a
// load, of as many sizes as it has batches, stay.
absl::Status CudaSession::DropOldRecordings() {
  SPLICE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream_), "a decode step");
  std::vector<uint64_t> passes;
  for (const auto& [key, recorded] : steps_) passes.push_back(recorded.last_pass);
  const auto last = passes.begin() + static_cast<std::ptrdiff_t>(passes.size() / 4);
  std::nth_element(passes.begin(), last, passes.end());
  std::erase_if(steps_, [oldest = *last](const auto& step) {
    if (step.second.last_pass > oldest) return false;
    if (step.second.exec != nullptr) (void)cudaGraphExecDestroy(step.second.exec);
    return true;
  });
  return absl::OkStatus();
}

absl::Status CudaSession::RunStep(uint64_t key, const std::function<absl::Status()>& step) {
  key ^= (static_cast<uint64_t>(batch_.max_kv_len) << 32) + static_cast<uint64_t>(batch_.num_rows);
  if (steps_.size() >= kMaxRecorded && !steps_.contains(key)) {
    if (absl::Status s = DropOldRecordings(); !s.ok()) return s;
  }
  Recorded& recorded = steps_[key];
  recorded.last_pass = pass_;
  // The first run allocates, loads modules and chooses GEMM variants, which a recording may not; the second records.
  if (recorded.num_runs++ == 0) return step();
  if (recorded.exec == nullptr) {
    SPLICE_CUDA_RETURN_IF_ERROR(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "recording a step");
    const absl::Status run = step();
    cudaGraph_t graph = nullptr;
    const cudaError_t ended = cudaStreamEndCapture(stream_, &graph);
    if (!run.ok()) {
      if (graph != nullptr) (void)cudaGraphDestroy(graph);
      return run;
    }
    SPLICE_CUDA_RETURN_IF_ERROR(ended, "recording a step");
    const cudaError_t made = cudaGraphInstantiate(&recorded.exec, graph, 0);
    (void)cudaGraphDestroy(graph);
    SPLICE_CUDA_RETURN_IF_ERROR(made, "making a recorded step");
  }
  return ToStatus(cudaGraphLaunch(recorded.exec, stream_), "replaying a step");
}

std::shared_ptr<const Fence> CudaSession::RecordFence() { return RecordEvent(stream_, Waiting::kSleeps); }

absl::Status CudaSession::Zero(void* device, size_t bytes) {
  return ToStatus(cudaMemsetAsync(device, 0, bytes, stream_), "zeroing memory");
}

absl::Status CudaSession::Synchronize() { return ToStatus(cudaStreamSynchronize(stream_), "running the pass"); }

absl::StatusOr<const void*> CudaSession::ReadBack(const void* device, size_t bytes) {
  if (read_back_ == nullptr || read_back_->size() < bytes) {
    read_back_.reset();
    auto memory = AllocatePinned(std::bit_ceil(std::max<size_t>(bytes, 4096)));
    if (!memory.ok()) return memory.status();
    read_back_ = *std::move(memory);
  }
  SPLICE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(read_back_->data(), device, bytes, cudaMemcpyDeviceToHost, stream_),
                              "reading results back");
  if (absl::Status s = Synchronize(); !s.ok()) return s;
  return read_back_->data();
}

absl::StatusOr<std::unique_ptr<HostCopy>> CudaSession::ReadBackLater(const void* device, size_t bytes) {
  std::unique_ptr<Buffer> memory;
  if (!free_read_backs_.empty()) {
    memory = std::move(free_read_backs_.back());
    free_read_backs_.pop_back();
  }
  if (memory == nullptr || memory->size() < bytes) {
    auto larger = AllocatePinned(std::bit_ceil(std::max<size_t>(bytes, 4096)));
    if (!larger.ok()) return larger.status();
    memory = *std::move(larger);
  }
  auto copy = std::make_unique<PinnedCopy>(std::move(memory), free_read_backs_);
  if (absl::Status s = copy->Begin(device, bytes, stream_); !s.ok()) return s;
  return std::unique_ptr<HostCopy>(std::move(copy));
}

absl::StatusOr<void*> CudaSession::Scratch(Use use, size_t bytes) {
  auto& blocks = scratch_[static_cast<int>(use)];
  if (use == Use::kWidePages && (blocks.empty() || blocks.back()->size() < bytes)) {
    // Large, and no recorded step reads them: the old block goes first, which waits for the device.
    blocks.clear();
    auto block = AllocateDevice(bytes + bytes / 8);
    if (!block.ok()) return block.status();
    blocks.push_back(*std::move(block));
  }
  if (blocks.empty() || blocks.back()->size() < bytes) {
    auto block = AllocateDevice(std::bit_ceil(std::max<size_t>(bytes, 64 << 10)));
    if (!block.ok()) return block.status();
    blocks.push_back(*std::move(block));
  }
  return blocks.back()->data();
}

absl::StatusOr<std::vector<std::byte*>> CudaSession::StageArrays(
    Use use, size_t reserved, std::initializer_list<std::span<const std::byte>> arrays) {
  constexpr size_t kAlignment = 16;
  const auto aligned = [](size_t n) { return (n + kAlignment - 1) / kAlignment * kAlignment; };
  size_t bytes = 0;
  for (const auto& array : arrays) bytes += aligned(array.size());
  auto block = Scratch(use, aligned(reserved) + bytes);
  if (!block.ok()) return block.status();
  auto pinned = Pinned(bytes);
  if (!pinned.ok()) return pinned.status();
  std::byte* const to = static_cast<std::byte*>(*block) + aligned(reserved);
  std::vector<std::byte*> staged;
  size_t at = 0;
  for (const auto& array : arrays) {
    if (!array.empty()) std::memcpy(*pinned + at, array.data(), array.size());
    staged.push_back(to + at);
    at += aligned(array.size());
  }
  SPLICE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(to, *pinned, bytes, cudaMemcpyHostToDevice, stream_), "copying tables");
  if (absl::Status s = PinnedUsed(); !s.ok()) return s;
  return staged;
}

absl::StatusOr<std::vector<std::byte*>> CudaSession::StageChangedArrays(
    Use use, std::initializer_list<std::span<const std::byte>> arrays) {
  LastArrays& last = last_arrays_[static_cast<int>(use)];
  LastArrays now;
  for (const auto& array : arrays) {
    now.sizes.push_back(array.size());
    now.bytes.insert(now.bytes.end(), array.begin(), array.end());
  }
  if (now.sizes == last.sizes && now.bytes == last.bytes) return last.staged;
  last = {};  // the contents of the device are unknown if the copy fails
  auto staged = StageArrays(use, 0, arrays);
  if (!staged.ok()) return staged.status();
  now.staged = *staged;
  last = std::move(now);
  return staged;
}

absl::StatusOr<const int32_t*> CudaSession::StageIds(std::span<const int32_t> ids) {
  const size_t bytes = ids.size() * sizeof(int32_t);
  if (bytes > ids_->size())
    return absl::ResourceExhaustedError(
        absl::StrCat("cuda: ", ids.size(), " rows asked for, at most ", options_.max_rows, " fit"));
  auto pinned = Pinned(bytes);
  if (!pinned.ok()) return pinned.status();
  std::memcpy(*pinned, ids.data(), bytes);
  SPLICE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(ids_->data(), *pinned, bytes, cudaMemcpyHostToDevice, stream_),
                              "copying row numbers");
  if (absl::Status s = PinnedUsed(); !s.ok()) return s;
  return static_cast<const int32_t*>(ids_->data());
}

}  // namespace spl::kernels::cuda
