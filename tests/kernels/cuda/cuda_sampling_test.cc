// Sampling on the CUDA backend against the CPU's variant, bit for bit. Skipped where there is no GPU.
#include <gtest/gtest.h>

#include "kernels/backend/backend.h"
#include "kernels/backend/cuda/cuda_plugin.h"
#include "kernels/sampling/sample_tokens.h"
#include "tests/kernels/sampling/sampling_batch.h"
#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

class CudaSamplingTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto cuda = MakeCudaBackend();
    if (!cuda.ok()) GTEST_SKIP() << cuda.status();
    cuda_ = *std::move(cuda);
    session_ = cuda_->NewSession({.max_rows = 8, .max_sequences = 8, .num_layers = 1, .num_kv_heads = 1}).value();
  }

  template <typename T>
  std::unique_ptr<Buffer> Upload(const std::vector<T>& from) const {
    auto buffer = cuda_->Allocate(std::max<size_t>(from.size(), 1) * sizeof(T)).value();
    ExpectOk(cuda_->Copy(CopyKind::kUpload, buffer->data(), from.data(), from.size() * sizeof(T)));
    return buffer;
  }
  template <typename T>
  void Download(const Buffer& from, std::vector<T>& to) const {
    ExpectOk(cuda_->Copy(CopyKind::kDownload, to.data(), from.data(), to.size() * sizeof(T)));
  }

  SamplingOutput Run(const SamplingBatch& batch) const {
    const auto logits = Upload(batch.logits);
    SamplingOutput out;
    SampleTokensArgs args = batch.Args(out);
    const auto rows = Upload(out.rows), top = Upload(out.top), tokens = Upload(out.tokens);
    args.logits = static_cast<const float*>(logits->data());
    args.out = static_cast<SampledRow*>(rows->data());
    args.top = static_cast<TopToken*>(top->data());
    args.tokens = static_cast<int32_t*>(tokens->data());
    ExpectOk(cuda_->SampleTokens(session_->context(), args));
    ExpectOk(session_->Synchronize());
    Download(*rows, out.rows);
    Download(*top, out.top);
    Download(*tokens, out.tokens);
    return out;
  }
  static SamplingOutput Expected(const SamplingBatch& batch) {
    return RunSampling(batch, &cpu::SampleTokens, {.isa = DetectCpuIsa()});
  }

  std::unique_ptr<Backend> cuda_;
  std::unique_ptr<Session> session_;
};

TEST_F(CudaSamplingTest, IsBitForBitTheCpu) {
  Random random(21);
  for (int round = 0; round < 400; ++round) {
    const int64_t width = random.Int(1, round % 2 == 0 ? 300 : 20'000);
    SCOPED_TRACE(::testing::Message() << "round " << round);
    const SamplingBatch batch = RandomSampling(random, width, 4, 8);
    ExpectSame(batch, Expected(batch), Run(batch));
    if (HasFatalFailure()) return;
  }
}

// Vocabularies of models, one whose rows do not fit shared memory, and ones that are no multiple of a vector.
TEST_F(CudaSamplingTest, EveryVocabularyWorks) {
  Random random(22);
  for (const int64_t width : {32, 128, 1024, 32'000, 32'003, 128'256, 151'936, 262'144, 393'000, 524'289, 1'048'576}) {
    SCOPED_TRACE(::testing::Message() << "width " << width);
    for (int round = 0; round < 6; ++round) {
      const SamplingBatch batch = RandomSampling(random, width, 2, 10);
      ExpectSame(batch, Expected(batch), Run(batch));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(CudaSamplingTest, LargeBatchesAreRowsAlone) {
  Random random(23);
  const SamplingBatch batch = RandomSampling(random, 128'256, 16, 16);
  const SamplingOutput together = Run(batch);
  ExpectSame(batch, Expected(batch), together);
  for (size_t i = 0; i < batch.rows.size(); i += 37) {
    SamplingBatch alone = batch;
    alone.rows = {batch.rows[i]};
    EXPECT_EQ(Run(alone).rows[0].token, together.rows[i].token);
  }
}

// Rows of a temperature alone, which have a kernel of their own: more rows than the device takes at a time,
// vocabularies that it takes and ones that it does not, and rows whose largest logit is no number or not finite.
TEST_F(CudaSamplingTest, RowsOfATemperatureAlone) {
  Random random(25);
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const int64_t width : {1, 4, 8, 100, 128, 1001, 2048, 32'000, 100'352, 128'256, 151'936, 202'048, 262'144}) {
    SCOPED_TRACE(::testing::Message() << "width " << width);
    SamplingBatch batch{.width = width};
    for (int row = 0; row < 43; ++row) {
      AppendLogits(random, batch);
      const std::span<float> logits = std::span(batch.logits).last(static_cast<size_t>(width));
      const auto any = [&]() -> float& {
        return logits[static_cast<size_t>(random.Int(0, static_cast<int>(width) - 1))];
      };
      if (row % 8 == 1) std::fill(logits.begin(), logits.end(), nan);
      if (row % 16 == 2) std::fill(logits.begin(), logits.end(), -inf);
      if (row % 8 == 3) any() = inf, any() = inf;
      if (row % 8 == 1 && row > 10) any() = row % 16 == 1 ? -inf : 1.5f;
      batch.rows.push_back({.logits_row = row % 5 == 4 ? row - 1 : row,
                            .temperature = OneOf(random, 1, 0.7f, 0.01f, 1e-30f, 30),
                            .random = row % 7 == 6 ? ~0ull : random.engine()()});
    }
    ExpectSame(batch, Expected(batch), Run(batch));
    if (HasFatalFailure()) return;
  }
}

// Lists of edits that grow step by step travel once, and are the ones that the host has; sequences that pause, jump
// ahead, come back after many others or appear twice in a batch are no exception.
TEST_F(CudaSamplingTest, EditsAreKeptBetweenSteps) {
  Random random(24);
  struct Sequence {
    std::vector<TokenEdit> edits;
    uint64_t id, version = 0;
    int32_t last = 0;
    void Generate(int32_t token) {
      size_t at = 0;
      while (at < edits.size() && edits[at].token != token) ++at;
      if (at == edits.size()) edits.push_back({.token = token});
      ++edits[at].count;
      ++version;
      last = static_cast<int32_t>(at);
    }
  };
  constexpr int64_t kWidth = 700;
  std::vector<Sequence> sequences(12);
  for (size_t i = 0; i < sequences.size(); ++i) {
    sequences[i].id = 1000 + i;
    sequences[i].edits = RandomEdits(random, kWidth, 40);
  }
  for (int step = 0; step < 600; ++step) {
    SamplingBatch batch{.width = kWidth};
    std::vector<Sequence*> of_row;
    for (Sequence& sequence : sequences) {
      if (random.Int(0, 9) == 0) continue;
      AppendLogits(random, batch);
      SampleRow row{.logits_row = static_cast<int32_t>(of_row.size()),
                    .temperature = OneOf(random, 0, 1),
                    .repetition_penalty = 1.3f,
                    .presence_penalty = 0.4f,
                    .frequency_penalty = 0.3f,
                    .random = random.engine()(),
                    .edits = sequence.edits,
                    .edits_id = sequence.id,
                    .edits_version = sequence.version,
                    .last_edit = sequence.last};
      batch.rows.push_back(row);
      of_row.push_back(&sequence);
      if (random.Int(0, 29) == 0) {
        batch.rows.push_back(row);
        of_row.push_back(nullptr);
        batch.logits.resize(batch.logits.size() + kWidth, 0.5f);
      }
    }
    if (step % 97 == 96) {  // more lists than are kept
      AppendLogits(random, batch);
      for (uint64_t other = 0; other < 600; ++other) {
        SampleRow row{.temperature = 1, .edits = sequences[0].edits, .edits_id = 5000 + other, .edits_version = 3};
        batch.rows.push_back(row);
        of_row.push_back(nullptr);
      }
    }
    const SamplingOutput out = Run(batch);
    ExpectSame(batch, Expected(batch), out);
    if (HasFatalFailure()) return;
    for (size_t i = 0; i < of_row.size(); ++i) {
      if (of_row[i] == nullptr) continue;
      of_row[i]->Generate(out.rows[i].token);
      if (random.Int(0, 19) == 0) of_row[i]->Generate(random.Int(0, kWidth - 1));  // one that was sampled elsewhere
    }
  }
}

TEST_F(CudaSamplingTest, RefusesWhatTheContractForbids) {
  SampleRow row{.temperature = -1};
  SampledRow out;
  const float logits[4] = {};
  EXPECT_EQ(cuda_
                ->SampleTokens(session_->context(),
                               {.logits = logits, .num_logit_rows = 1, .width = 4, .rows = {&row, 1}, .out = &out})
                .code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace spl::kernels
