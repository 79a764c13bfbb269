// Pages that are sent with their checksums: the reference, the CPU and the GPU (skipped where there is none) do the
// same.
#include "kernels/kv_copy/send_pages.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "kernels/backend/backend.h"
#include "kernels/backend/cuda/cuda_plugin.h"
#include "kernels/kv_copy/crc32c.h"
#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;
using Clock = std::chrono::steady_clock;
using Bytes = std::vector<std::byte>;

constexpr Clock::time_point kNoDeadline = Clock::time_point::max();

// Does something when it is waited for.
class CalledFence final : public Fence {
 public:
  explicit CalledFence(std::function<absl::Status()> wait) : wait_(std::move(wait)) {}
  absl::Status Wait() const override { return wait_(); }

 private:
  const std::function<absl::Status()> wait_;
};

class JoinedFence final : public Fence {
 public:
  explicit JoinedFence(std::vector<std::shared_ptr<const Fence>> fences) : fences_(std::move(fences)) {}
  absl::Status Wait() const override {
    for (const auto& fence : fences_) {
      if (absl::Status s = fence->Wait(); !s.ok()) return s;
    }
    return absl::OkStatus();
  }
  std::span<const std::shared_ptr<const Fence>> joined() const override { return fences_; }

 private:
  const std::vector<std::shared_ptr<const Fence>> fences_;
};

class SendPagesTest : public ::testing::TestWithParam<std::string> {
 protected:
  // Memory of the backend with as many pages.
  struct Pool {
    Pool(const Backend& backend, Bytes bytes) : backend(backend), before(std::move(bytes)) {
      memory = backend.Allocate(before.size()).value();
      ExpectOk(backend.Copy(CopyKind::kUpload, memory->data(), before.data(), before.size()));
    }
    std::byte* page(size_t at, size_t page_bytes) const {
      return static_cast<std::byte*>(memory->data()) + at * page_bytes;
    }
    Bytes Now() const {
      Bytes bytes(before.size());
      ExpectOk(backend.Copy(CopyKind::kDownload, bytes.data(), memory->data(), bytes.size()));
      return bytes;
    }
    const Backend& backend;
    const Bytes before;
    std::unique_ptr<Buffer> memory;
  };

  void SetUp() override {
    if (GetParam() == "cuda") {
      auto cuda = MakeCudaBackend();
      if (!cuda.ok()) GTEST_SKIP() << cuda.status();
      backend_ = *std::move(cuda);
    } else {
      backend_ = GetParam() == "cpu" ? MakeCpuBackend() : MakeReferenceBackend();
    }
  }
  bool on_gpu() const { return GetParam() == "cuda"; }
  std::unique_ptr<PageSends> NewSends(size_t page_bytes) const { return backend_->NewPageSends(page_bytes).value(); }
  Bytes RandomBytes(size_t count) {
    Bytes bytes(count);
    for (std::byte& b : bytes) b = static_cast<std::byte>(random_.Int(0, 255));
    return bytes;
  }
  static uint32_t CrcOf(const Bytes& bytes, size_t page, size_t page_bytes) {
    return ref::Crc32cExtend(0, bytes.data() + page * page_bytes, page_bytes);
  }

  std::unique_ptr<Backend> backend_;
  Random random_{91};
};

// Pages of all sorts of sizes: smaller than what a warp reads at once, no multiple of it, and with scales behind their
// rows. They come from anywhere, some twice, and go anywhere.
TEST_P(SendPagesTest, AnyLayoutArrivesWithItsChecksums) {
  for (const size_t page_bytes : {16, 496, 512, 2048, 8208, 16512, 32768, 65536}) {
    constexpr size_t kPages = 60;
    const Pool from(*backend_, RandomBytes(kPages * page_bytes)), to(*backend_, RandomBytes(kPages * page_bytes));
    std::vector<size_t> targets(kPages);
    std::iota(targets.begin(), targets.end(), size_t{0});
    std::shuffle(targets.begin(), targets.end(), random_.engine());
    targets.resize(kPages - 7);
    Bytes want = to.before;
    std::vector<uint32_t> want_crcs, crcs;
    const auto sends = NewSends(page_bytes);
    for (size_t next = 0; next < targets.size();) {
      const size_t count = std::min<size_t>(static_cast<size_t>(random_.Int(1, 30)), targets.size() - next);
      std::vector<PageSend> pages;
      for (size_t i = next; i < next + count; ++i) {
        const auto source = static_cast<size_t>(random_.Int(0, kPages - 1));
        pages.push_back({to.page(targets[i], page_bytes), from.page(source, page_bytes)});
        std::copy_n(from.before.begin() + static_cast<std::ptrdiff_t>(source * page_bytes), page_bytes,
                    want.begin() + static_cast<std::ptrdiff_t>(targets[i] * page_bytes));
        want_crcs.push_back(CrcOf(from.before, source, page_bytes));
      }
      ExpectOk(sends->Start(pages, {}, kNoDeadline));
      next += count;
    }
    ExpectOk(sends->Finish(crcs));
    EXPECT_EQ(crcs, want_crcs) << page_bytes;
    EXPECT_TRUE(to.Now() == want) << page_bytes;
  }
}

TEST_P(SendPagesTest, OneCallTakesAnyNumberOfPages) {
  constexpr size_t kBytes = 64, kPages = 40'000;
  const Pool from(*backend_, RandomBytes(kPages * kBytes)), to(*backend_, Bytes(kPages * kBytes));
  std::vector<PageSend> pages;
  std::vector<uint32_t> want, crcs;
  for (size_t i = 0; i < kPages; ++i) {
    pages.push_back({to.page(i, kBytes), from.page(kPages - 1 - i, kBytes)});
    want.push_back(CrcOf(from.before, kPages - 1 - i, kBytes));
  }
  const auto sends = NewSends(kBytes);
  for (int again = 0; again < 2; ++again) {
    ExpectOk(sends->Start(pages, {}, kNoDeadline));
    ExpectOk(sends->Finish(crcs));
    EXPECT_TRUE(crcs == want);
  }
  EXPECT_EQ(CrcOf(to.Now(), 0, kBytes), want[0]);
  ExpectOk(sends->Finish(crcs));
  EXPECT_TRUE(crcs.empty()) << "nothing was sent since";
}

// Two prompts, in turns.
TEST_P(SendPagesTest, TransfersKeepTheirChecksumsApart) {
  constexpr size_t kBytes = 2048;
  const Pool from(*backend_, RandomBytes(4 * kBytes)), to(*backend_, Bytes(4 * kBytes));
  const auto a = NewSends(kBytes), b = NewSends(kBytes);
  for (size_t i = 0; i < 4; ++i) {
    const PageSend page{to.page(i, kBytes), from.page(i, kBytes)};
    ExpectOk((i % 2 == 0 ? a : b)->Start({&page, 1}, {}, kNoDeadline));
  }
  std::vector<uint32_t> crcs;
  ExpectOk(a->Finish(crcs));
  EXPECT_THAT(crcs, ElementsAre(CrcOf(from.before, 0, kBytes), CrcOf(from.before, 2, kBytes)));
  ExpectOk(b->Finish(crcs));
  EXPECT_THAT(crcs, ElementsAre(CrcOf(from.before, 1, kBytes), CrcOf(from.before, 3, kBytes)));
}

TEST_P(SendPagesTest, PagesAreReadBehindTheirFences) {
  constexpr size_t kBytes = 2048;
  const Pool from(*backend_, Bytes(2 * kBytes)), to(*backend_, Bytes(2 * kBytes));
  const Bytes written = RandomBytes(2 * kBytes);
  const auto writes = [&](size_t page) {
    return std::make_shared<CalledFence>([&, page] {
      return backend_->Copy(CopyKind::kUpload, from.page(page, kBytes), written.data() + page * kBytes, kBytes);
    });
  };
  const auto joined = std::make_shared<JoinedFence>(std::vector<std::shared_ptr<const Fence>>{writes(0), writes(1)});
  const std::vector<PageSend> pages = {{to.page(0, kBytes), from.page(0, kBytes)},
                                       {to.page(1, kBytes), from.page(1, kBytes)}};
  const auto sends = NewSends(kBytes);
  ExpectOk(sends->Start(pages, std::vector<std::shared_ptr<const Fence>>{nullptr, joined}, kNoDeadline));
  std::vector<uint32_t> crcs;
  ExpectOk(sends->Finish(crcs));
  EXPECT_THAT(crcs, ElementsAre(CrcOf(written, 0, kBytes), CrcOf(written, 1, kBytes)));
  EXPECT_TRUE(to.Now() == written);
}

TEST_P(SendPagesTest, AFailedFenceEndsTheTransferAndNotTheNext) {
  constexpr size_t kBytes = 512;
  const Pool from(*backend_, RandomBytes(kBytes)), to(*backend_, Bytes(kBytes));
  const PageSend page{to.page(0, kBytes), from.page(0, kBytes)};
  const auto sends = NewSends(kBytes);
  ExpectOk(sends->Start({&page, 1}, {}, kNoDeadline));
  const std::shared_ptr<const Fence> broken =
      std::make_shared<CalledFence>([] { return absl::DataLossError("the device is gone"); });
  EXPECT_EQ(sends->Start({&page, 1}, {&broken, 1}, kNoDeadline).code(), absl::StatusCode::kDataLoss);
  std::vector<uint32_t> crcs = {1};
  EXPECT_EQ(sends->Finish(crcs).code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(crcs.empty());
  ExpectOk(sends->Start({&page, 1}, {}, kNoDeadline));
  ExpectOk(sends->Finish(crcs));
  EXPECT_THAT(crcs, ElementsAre(CrcOf(from.before, 0, kBytes)));
}

TEST_P(SendPagesTest, NoPageIsWrittenAtTheDeadline) {
  constexpr size_t kBytes = 512;
  const Pool from(*backend_, RandomBytes(kBytes)), to(*backend_, Bytes(kBytes));
  const PageSend page{to.page(0, kBytes), from.page(0, kBytes)};
  const auto sends = NewSends(kBytes);
  EXPECT_EQ(sends->Start({&page, 1}, {}, Clock::now()).code(), absl::StatusCode::kDeadlineExceeded);
  std::vector<uint32_t> crcs;
  EXPECT_EQ(sends->Finish(crcs).code(), absl::StatusCode::kDeadlineExceeded);
  // It passes while the pages are waited for.
  const auto deadline = Clock::now() + std::chrono::milliseconds(5);
  const std::shared_ptr<const Fence> late = std::make_shared<CalledFence>([deadline] {
    while (Clock::now() < deadline) {
    }
    return absl::OkStatus();
  });
  (void)sends->Start({&page, 1}, {&late, 1}, deadline);  // or Finish tells
  EXPECT_EQ(sends->Finish(crcs).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(crcs.empty());
  EXPECT_TRUE(to.Now() == to.before);
  ExpectOk(sends->Start({&page, 1}, {}, Clock::now() + std::chrono::minutes(1)));
  ExpectOk(sends->Finish(crcs));
  EXPECT_TRUE(to.Now() == from.before);
}

// On a GPU the writes wait in its queue, behind a pass: Start returns before the pass is over, and the device itself
// keeps the deadline.
TEST_P(SendPagesTest, ADeviceWaitsForThePassAndKeepsTheDeadline) {
  if (!on_gpu()) GTEST_SKIP() << "nothing is in a queue";
  constexpr size_t kBytes = 32768;
  const auto session = backend_->NewSession({.max_rows = 1, .max_sequences = 1}).value();
  const auto busy = backend_->Allocate(size_t{1} << 30).value();
  const Pool from(*backend_, RandomBytes(kBytes)), to(*backend_, RandomBytes(kBytes));
  // Some 25 ms, and zeros at its end.
  const auto pass = [&]() -> std::shared_ptr<const Fence> {
    for (int i = 0; i < 100; ++i) ExpectOk(session->Zero(busy->data(), busy->size()));
    ExpectOk(session->Zero(from.memory->data(), kBytes));
    return session->RecordFence();
  };
  const PageSend page{to.page(0, kBytes), from.page(0, kBytes)};
  const auto sends = NewSends(kBytes);
  std::vector<uint32_t> crcs;
  auto fence = pass();
  const auto begin = Clock::now();
  ExpectOk(sends->Start({&page, 1}, {&fence, 1}, begin + std::chrono::milliseconds(2)));
  const auto started = Clock::now() - begin;
  EXPECT_EQ(sends->Finish(crcs).code(), absl::StatusCode::kDeadlineExceeded);
  const auto finished = Clock::now() - begin;
  EXPECT_LT(started * 4, finished) << "Start waited for the pass";
  EXPECT_TRUE(to.Now() == to.before);
  fence = pass();
  ExpectOk(sends->Start({&page, 1}, {&fence, 1}, Clock::now() + std::chrono::minutes(1)));
  ExpectOk(sends->Finish(crcs));
  EXPECT_TRUE(to.Now() == Bytes(kBytes));
  EXPECT_THAT(crcs, ElementsAre(CrcOf(Bytes(kBytes), 0, kBytes)));
}

TEST_P(SendPagesTest, RefusesPagesOfNoWholeVectors) {
  for (const size_t bytes : {0, 8, 1000})
    EXPECT_EQ(backend_->NewPageSends(bytes).status().code(), absl::StatusCode::kInvalidArgument) << bytes;
}

INSTANTIATE_TEST_SUITE_P(Variants, SendPagesTest, ::testing::Values("ref", "cpu", "cuda"),
                         [](const ::testing::TestParamInfo<std::string>& info) { return info.param; });

}  // namespace
}  // namespace spl::kernels
