// Models whose K and V are in FP8: logits beside those of the reference implementation, what a page's scales are worth,
// and that pages of other types never pass for these. That reuse and decoding keep what they promise with such pages is
// tested by running their tests with SPLICE_TEST_KV=fp8 (CMakeLists.txt).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "kernels/backend/backend.h"
#include "kernels/common/kv_rows.h"
#include "services/engine/engine.h"
#include "services/engine/methods/recovery_methods.h"
#include "tests/services/engine/engines_fixture.h"
#include "tests/services/engine/prompt_runs.h"
#include "tests/support/engine_devices.h"
#include "tests/support/paths.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

using kernels::DType;
using test::RelativeL2;

// Relative L2 of the logits: at most `bound`. Products are of f32, so that nothing else is rounded.
struct Golden {
  const char* name;
  double bound;
};

class Fp8KvGoldenTest : public testing::TestWithParam<Golden> {
 protected:
  void SetUp() override {
    const std::string shared = test::SharedDir();
    if (shared.empty()) GTEST_SKIP() << "no shared/golden beside the checkout";
    const std::string folder = shared + "/golden/" + GetParam().name;
    golden_ = *SafetensorsFile::Open(folder + "/golden.safetensors");
    folder_ = std::string(GetParam().name) == "splice-tiny" ? test::kTinyModel : folder;
  }
  template <typename T>
  std::vector<T> Values(const std::string& name) const {
    const auto tensor = *golden_->Find(name);
    std::vector<T> values(tensor.bytes / sizeof(T));
    std::memcpy(values.data(), tensor.data, tensor.bytes);
    return values;
  }
  std::vector<float> Logits(std::unique_ptr<const kernels::Backend> backend, DType kv_dtype,
                            const std::string& prompt) const {
    const auto model = Model::Load(folder_, std::move(backend), {.kv_dtype = kv_dtype}).value();
    const auto generator = LocalGenerator::Create(model, {.executor = {.max_rows = 128}, .max_tokens = 1024}).value();
    return generator->AllLogits(Values<int32_t>(prompt + ".input_ids")).value();
  }
  static std::unique_ptr<const kernels::Backend> Cpu() {
    return kernels::MakeCpuBackend({.gemm = kernels::GemmCompute::kF32});
  }

  std::unique_ptr<SafetensorsFile> golden_;
  std::string folder_;
};

TEST_P(Fp8KvGoldenTest, LogitsAreNearAndBackendsAgree) {
  for (int p = 0; golden_->Contains("p" + std::to_string(p) + ".input_ids"); ++p) {
    const std::string prefix = "p" + std::to_string(p);
    const bool all = golden_->Contains(prefix + ".logits");
    const std::vector<float> want = Values<float>(prefix + (all ? ".logits" : ".last_logits"));
    const std::vector<float> cpu = Logits(Cpu(), DType::kE4M3, prefix), bf16 = Logits(Cpu(), DType::kBF16, prefix);
    const auto last = [&](const std::vector<float>& logits) { return std::span(logits).last(want.size()); };
    const double error = RelativeL2(last(cpu), want), of_bf16 = RelativeL2(last(bf16), want);
    std::printf("%s %s: relative L2 of the logits %.1e with K and V in FP8, %.1e in bf16\n", GetParam().name,
                prefix.c_str(), error, of_bf16);
    EXPECT_LE(error, GetParam().bound) << prefix;
    EXPECT_GT(error, of_bf16) << "three bits of mantissa round more than seven";
    if (std::string(GetParam().name) == "splice-tiny") continue;  // a minute of plain loops
    // The same rows but for keys that lie between two codes: f32 and double do not round the same one of them.
    const double apart = RelativeL2(cpu, Logits(kernels::MakeReferenceBackend(), DType::kE4M3, prefix));
    std::printf("  CPU and reference differ by %.1e\n", apart);
    EXPECT_LE(apart, 1e-2) << prefix;
  }
}

// Measured: 0.102 (tiny-qwen2), 0.083 at most for the other random models, and 0.031 for splice-tiny.
INSTANTIATE_TEST_SUITE_P(Models, Fp8KvGoldenTest,
                         testing::Values(Golden{"tiny-llama3", 0.1}, Golden{"tiny-mistral", 0.1},
                                         Golden{"tiny-qwen2", 0.13}, Golden{"tiny-qwen3", 0.1},
                                         Golden{"tiny-qwen3-moe", 0.1}, Golden{"splice-tiny", 0.04}),
                         [](const auto& info) {
                           std::string name = info.param.name;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// splice-tiny with K and V in this type, and a pool for it.
struct Machine {
  explicit Machine(DType kv_dtype)
      : model(Model::Load(test::kTinyModel, kernels::MakeCpuBackend(), {.kv_dtype = kv_dtype}).value()),
        memory(AllocateKvMemory(*model, PagesForTokens(model->config(), 4096)).value()) {
    Poison(*model, memory);
    pool = std::make_unique<PagePool>(memory.pages, model->backends());
    executor = ParallelExecutor::Create(model, memory.pages, {.num_threads = 2, .max_rows = 256}).value();
  }
  // The first `chunks` chunks of `prefix` are the prompt's, too.
  std::vector<float> Prefill(const std::vector<int32_t>& tokens, std::shared_ptr<SequenceKv>& kv,
                             const SequenceKv* prefix = nullptr, int32_t chunks = 0) const {
    kv = std::make_shared<SequenceKv>(*pool, KvShapeOf(model->config()));
    for (int32_t i = 0; i < chunks; ++i) kv->AppendShared(prefix->PagesOfChunk(i));
    EXPECT_TRUE(kv->Reserve(static_cast<int64_t>(tokens.size())).ok());
    const auto exact = MakeRecoveryPolicy({.policy = "exact"}, model->config()).value();
    PromptRun run(tokens, {}, *kv, *exact);
    return RunToEnd(run, *executor, executor->max_rows());
  }

  std::shared_ptr<const Model> model;
  KvMemory memory;
  std::unique_ptr<PagePool> pool;
  std::unique_ptr<ParallelExecutor> executor;
};

TEST(Fp8KvTest, APageIsHalfAsLargeAndHasALayoutOfItsOwn) {
  const Machine fp8(DType::kE4M3), bf16(DType::kBF16), f32(DType::kF32);
  const int32_t dim = fp8.model->config().head_dim;
  EXPECT_EQ(fp8.model->page_bytes(), 2u * 64 * (static_cast<size_t>(dim) + 1));
  EXPECT_EQ(bf16.model->page_bytes(), 2u * 64 * 2 * static_cast<size_t>(dim));
  EXPECT_EQ(fp8.model->fingerprint(), bf16.model->fingerprint());
  EXPECT_EQ(bf16.model->kv_fingerprint(), bf16.model->fingerprint());
  EXPECT_NE(fp8.model->kv_fingerprint(), bf16.model->kv_fingerprint());
  EXPECT_NE(fp8.model->layout_digest(), bf16.model->layout_digest());
  EXPECT_NE(fp8.model->layout_digest(), f32.model->layout_digest());
  for (const DType type : {DType::kF16, DType::kInt4}) {
    const auto refused = Model::Load(test::kTinyModel, kernels::MakeCpuBackend(), {.kv_dtype = type});
    EXPECT_THAT(refused.status().ToString(), testing::HasSubstr("(f32, bf16, fp8)"));
  }
}

// Pages of a prefix give the bits of a prompt that was computed at once; with one wrong scale they do not.
TEST(Fp8KvTest, ScalesAreRead) {
  std::mt19937 random = test::SeededRandom("scales");
  const Machine machine(DType::kE4M3);
  const std::vector<int32_t> tokens = test::RandomTokens(random, 300);
  std::shared_ptr<SequenceKv> whole, continued;
  const std::vector<float> want = machine.Prefill(tokens, whole);
  EXPECT_EQ(machine.Prefill(tokens, continued, whole.get(), 3), want);
  const size_t half = machine.model->page_bytes() / 2;
  for (const size_t part : {size_t{0}, half}) {
    const int32_t layer = 1, page = whole->stream(layer, 0)[1], slot = 17;
    std::vector<std::byte> good(machine.model->page_bytes());
    ASSERT_TRUE(machine.pool->ReadPages({&page, 1}, good.data()).ok());
    std::vector<std::byte> bad = good;
    uint8_t& scale = kernels::KvRowScale(machine.model->config().head_dim, bad.data() + part, slot);
    scale = static_cast<uint8_t>(scale + 3);
    ASSERT_TRUE(machine.pool->WritePages({&page, 1}, bad.data()).ok());
    const std::vector<float> wrong = machine.Prefill(tokens, continued, whole.get(), 3);
    const double error = RelativeL2(wrong, want);
    std::printf("one scale of %s eight times too large: relative L2 of the logits %.1e\n", part == 0 ? "K" : "V",
                error);
    EXPECT_GT(error, 1e-4);
    ASSERT_TRUE(machine.pool->WritePages({&page, 1}, good.data()).ok());
    EXPECT_EQ(machine.Prefill(tokens, continued, whole.get(), 3), want);
  }
}

// Through the store and back: what one worker computed another one of the same type finds, and none of another type.
class Fp8KvStoreTest : public EnginesTest {
 protected:
  static void Use(DType kv_dtype) {
    model_ = Model::Load(test::kTinyModel, kernels::MakeCpuBackend(), {.kv_dtype = kv_dtype}).value();
  }
};

TEST_F(Fp8KvStoreTest, ChunksOfAnotherTypeAreNotFound) {
  std::mt19937 random = test::SeededRandom("stored chunks");
  const std::vector<int32_t> prompt = RandomPrompt(random, 500);
  const auto ask = [&](DType kv_dtype, const std::shared_ptr<FakeStore>& store) {
    StopAll();
    Use(kv_dtype);
    PrefillEngineOptions options;
    options.store = store;
    Start(8192, 8192, options);
    const auto outcome = Ask(prompt, nullptr);
    EXPECT_EQ(outcome->tokens, Expected(prompt, Greedy(6)));
    return outcome->stats.stored_tokens;
  };
  const auto store = std::make_shared<FakeStore>();
  EXPECT_EQ(ask(DType::kE4M3, store), 0);
  ASSERT_TRUE(store->WaitForSize(7));
  const auto key = chunk::MakePrefixKeys(model_->kv_fingerprint(), {}, prompt)[0];
  EXPECT_EQ(store->Find(key)->payload.size(), ChunkPayloadBytes(*model_));
  EXPECT_EQ(ask(DType::kE4M3, store), 448);
  // Both keep theirs in one store.
  EXPECT_EQ(ask(DType::kBF16, store), 0);
  ASSERT_TRUE(store->WaitForSize(14));
  EXPECT_EQ(ask(DType::kBF16, store), 448);
  EXPECT_EQ(ask(DType::kE4M3, store), 448);
}

}  // namespace
}  // namespace spl::engine
