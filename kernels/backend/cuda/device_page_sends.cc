#include "kernels/backend/cuda/device_page_sends.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "kernels/backend/cuda/cuda_session.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/kv_copy/send_pages_cuda.h"

namespace spl::kernels::cuda {
namespace {

using Clock = std::chrono::steady_clock;

constexpr char kWhat[] = "sending pages";
constexpr size_t kListsKept = 64;  // 20 MiB: eight prompts of 32,768 tokens with 256 heads
// Clocks that part by 100 millionths are a millisecond apart by then.
constexpr std::chrono::seconds kComparedEvery{10};
constexpr std::chrono::hours kFarAhead{24};

class DevicePageSends final : public PageSends {
 public:
  DevicePageSends(PageSending& sending, size_t page_bytes, cudaEvent_t sent)
      : sending_(sending), page_bytes_(page_bytes), sent_(sent) {}
  ~DevicePageSends() override {
    std::vector<uint32_t> unused;
    (void)Finish(unused);
    (void)cudaEventDestroy(sent_);
  }

  absl::Status Start(std::span<const PageSend> pages, std::span<const std::shared_ptr<const Fence>> behind,
                     Clock::time_point deadline) override {
    absl::Status status = TryStart(pages, behind, deadline);
    if (status_.ok()) status_ = status;
    return status;
  }

  absl::Status Finish(std::vector<uint32_t>& crcs) override {
    crcs.clear();
    absl::Status status = std::exchange(status_, absl::OkStatus());
    if (!lists_.empty()) {
      if (const absl::Status sent = WaitForAll(status.ok()); status.ok()) status = sent;
    }
    for (const SendList& list : lists_) {
      if (status.ok() && *list.late() != 0) status = SentTooLate();
    }
    if (status.ok()) {
      for (const SendList& list : lists_) crcs.insert(crcs.end(), list.crcs(), list.crcs() + list.size());
    }
    sending_.GiveBack(std::exchange(lists_, {}));
    return status;
  }

 private:
  absl::Status TryStart(std::span<const PageSend> pages, std::span<const std::shared_ptr<const Fence>> behind,
                        Clock::time_point deadline) {
    if (Clock::now() >= deadline) return SentTooLate();
    if (absl::Status s = sending_.UseDevice(); !s.ok()) return s;
    const auto device_deadline = sending_.OnDeviceClock(deadline);
    if (!device_deadline.ok()) return device_deadline.status();
    for (const auto& fence : behind) {
      if (fence == nullptr) continue;
      if (absl::Status s = WaitOnDevice(sending_.stream(), *fence); !s.ok()) return s;
      last_behind_ = fence;
    }
    if (pages.empty()) return absl::OkStatus();
    cudaPointerAttributes target{};
    SPLICE_CUDA_RETURN_IF_ERROR(cudaPointerGetAttributes(&target, pages[0].to), kWhat);
    const bool within = target.device == sending_.device();
    while (!pages.empty()) {
      if (lists_.empty() || lists_.back().size() == SendList::kPagesMax) {
        auto list = sending_.TakeList();
        if (!list.ok()) return list.status();
        lists_.push_back(*std::move(list));
      }
      SendList& list = lists_.back();
      const int64_t first = list.size(), added = list.Add(pages);
      SPLICE_CUDA_RETURN_IF_ERROR(SendPages(list.pages() + first, added, page_bytes_, within, list.crcs() + first,
                                            list.late(), *device_deadline, sending_.stream()),
                                  kWhat);
      pages = pages.subspan(static_cast<size_t>(added));
    }
    return ToStatus(cudaEventRecord(sent_, sending_.stream()), kWhat);
  }

  // A pass in front may take long, and costs the thread no core; what was sent behind it takes microseconds. After an
  // error the event may be missing behind the last launch.
  absl::Status WaitForAll(bool has_event) {
    if (absl::Status s = sending_.UseDevice(); !s.ok()) return s;
    const auto behind = std::exchange(last_behind_, nullptr);
    const absl::Status reached = behind != nullptr ? behind->Wait() : absl::OkStatus();
    SPLICE_CUDA_RETURN_IF_ERROR(has_event ? cudaEventSynchronize(sent_) : cudaStreamSynchronize(sending_.stream()),
                                kWhat);
    return reached;
  }

  PageSending& sending_;
  const size_t page_bytes_;
  const cudaEvent_t sent_;  // behind the last launch
  std::vector<SendList> lists_;
  std::shared_ptr<const Fence> last_behind_;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<SendList> SendList::Create() {
  auto memory = AllocatePinned(kHeaderBytes + kPagesMax * (sizeof(PageSend) + sizeof(uint32_t)));
  if (!memory.ok()) return memory.status();
  return SendList(*std::move(memory));
}

void SendList::Clear() {
  size_ = 0;
  *late() = 0;
}

int64_t SendList::Add(std::span<const PageSend> pages) {
  const int64_t count = std::min(static_cast<int64_t>(pages.size()), kPagesMax - size_);
  std::copy_n(pages.begin(), count, this->pages() + size_);
  size_ += count;
  return count;
}

PageSending::~PageSending() {
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  if (clock_stream_ != nullptr) (void)cudaStreamDestroy(clock_stream_);
}

absl::Status PageSending::Init() {
  if (absl::Status s = UseDevice(); !s.ok()) return s;
  int lowest = 0, highest = 0;
  SPLICE_CUDA_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
  SPLICE_CUDA_RETURN_IF_ERROR(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "creating a stream");
  SPLICE_CUDA_RETURN_IF_ERROR(cudaStreamCreateWithPriority(&clock_stream_, cudaStreamNonBlocking, highest),
                              "creating a stream");
  auto clock = AllocatePinned(sizeof(uint64_t));
  if (!clock.ok()) return clock.status();
  clock_ = *std::move(clock);
  return absl::OkStatus();
}

absl::Status PageSending::UseDevice() const { return ToStatus(cudaSetDevice(device_), "choosing the GPU"); }

absl::StatusOr<std::unique_ptr<PageSends>> PageSending::NewSends(size_t page_bytes) {
  if (absl::Status valid = ValidatePageBytes(page_bytes); !valid.ok()) return valid;
  if (absl::Status s = UseDevice(); !s.ok()) return s;
  cudaEvent_t sent = nullptr;
  SPLICE_CUDA_RETURN_IF_ERROR(cudaEventCreateWithFlags(&sent, cudaEventDisableTiming), "creating an event");
  return std::make_unique<DevicePageSends>(*this, page_bytes, sent);
}

absl::StatusOr<SendList> PageSending::TakeList() {
  {
    std::lock_guard lock(mutex_);
    if (!free_lists_.empty()) {
      SendList list = std::move(free_lists_.back());
      free_lists_.pop_back();
      list.Clear();
      return list;
    }
  }
  auto list = SendList::Create();
  if (list.ok()) list->Clear();
  return list;
}

void PageSending::GiveBack(std::vector<SendList> lists) {
  std::lock_guard lock(mutex_);
  for (SendList& list : lists) {
    if (free_lists_.size() < kListsKept) free_lists_.push_back(std::move(list));
  }
}

absl::Status PageSending::CompareClocksLocked() {
  auto* const now = static_cast<uint64_t*>(clock_->data());
  SPLICE_CUDA_RETURN_IF_ERROR(ReadClock(now, clock_stream_), "reading the GPU's clock");
  SPLICE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(clock_stream_), "reading the GPU's clock");
  compared_ = Clock::now();
  device_then_ = *now;
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> PageSending::OnDeviceClock(Clock::time_point moment) {
  std::lock_guard lock(mutex_);
  const Clock::time_point now = Clock::now();
  if (moment - now > kFarAhead) return std::numeric_limits<uint64_t>::max();
  if (!compared_.has_value() || now - *compared_ > kComparedEvery) {
    if (absl::Status s = CompareClocksLocked(); !s.ok()) return s;
  }
  return device_then_ + static_cast<uint64_t>(std::chrono::nanoseconds(moment - *compared_).count());
}

}  // namespace spl::kernels::cuda
