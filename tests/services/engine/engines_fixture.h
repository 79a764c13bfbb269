// A prefill and a decode engine on one small model, with a chunk store made of a map, for the tests of what they do
// together.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <random>

#include "kernels/backend/backend.h"
#include "services/engine/engine.h"
#include "services/engine/methods/selection_methods.h"
#include "tests/services/engine/fake_store.h"
#include "tests/support/engine_devices.h"
#include "tests/support/eventually.h"
#include "tests/support/paths.h"

namespace spl::engine {

using namespace std::chrono_literals;
using Tokens = std::vector<std::vector<int32_t>>;  // per fork

// Collects one request's way through both engines.
struct Outcome {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  absl::Status status;
  PrefillStats stats;
  std::vector<float> first_logits;
  std::vector<TokenLogprob> prompt_logprobs;
  Tokens tokens;
  std::vector<StepKind> kinds;  // of the steps of decoded tokens
  std::vector<float> logprobs;  // of decoded tokens, where the request asks for them, as in Answer

  void Finish(const absl::Status& s) {
    std::lock_guard lock(mutex);
    status = s;
    done = true;
    changed.notify_all();
  }
  bool Wait() {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, 60s, [&] { return done; });
  }
};

// Tokens with the probabilities of what was chosen and of what could have been.
struct Answer {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  bool operator==(const Answer&) const = default;
};

// With SPLICE_BACKEND=cuda the engines of tests that reach into no page run on a GPU.
class EnginesTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto devices = test::DevicesOf(test::OnGpu() ? "cuda" : "cpu");
    ASSERT_TRUE(devices.ok()) << devices.status();
    auto model = Model::Load(test::kTinyModel, *std::move(devices), {.kv_dtype = test::KvType()});
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *model;
  }
  static void TearDownTestSuite() { model_.reset(); }

  void Start(int64_t prefill_tokens = 8192, int64_t decode_tokens = 8192, PrefillEngineOptions prefill = {},
             DecodeEngineOptions decode = {}) {
    StopAll();
    decode_pool_ = std::make_unique<PagePool>(MakeMemory(decode_memory_, decode_tokens), &model_->backend());
    auto p = PrefillEngine::Create(model_, MakeMemory(prefill_memory_, prefill_tokens), prefill);
    ASSERT_TRUE(p.ok()) << p.status();
    prefill_ = std::move(*p);
    auto d = DecodeEngine::Create(model_, *decode_pool_, decode);
    ASSERT_TRUE(d.ok()) << d.status();
    decode_ = std::move(*d);
  }
  // Size of the smallest decode pool, in tokens, in which a prompt of that length can begin with its method.
  int64_t TokensToBegin(const DecodeOptions& options, int64_t prompt) {
    const KvShape shape = KvShapeOf(model_->config());
    const auto selector = MakeSelectorBehind("exact", prompt, options, *model_, nullptr).value();
    const auto needs = CompactNeedsOf(*selector, *model_, prompt);
    const int64_t beside = needs.has_value() ? CompactPages::PagesByRank(shape, *needs, 1, prompt + 1)[0] : 0;
    const int64_t streams = shape.num_streams();
    return (PagesFor(prompt) + (beside + streams - 1) / streams) * kernels::kPageTokens;
  }
  void StopAll() {
    if (prefill_) prefill_->Stop();
    if (decode_) decode_->Stop();
    prefill_.reset();
    decode_.reset();
  }
  void TearDown() override { StopAll(); }

  kernels::KvPoolView MakeMemory(std::unique_ptr<kernels::Buffer>& memory, int64_t tokens) {
    const int64_t pages = PagesForTokens(model_->config(), tokens);
    memory = std::move(*model_->backend().Allocate(pages * model_->page_bytes()));
    // NaN everywhere: whatever a kernel reads beyond what was written shows.
    if (model_->backend().host_memory()) std::memset(memory->data(), 0xff, memory->size());
    return {static_cast<std::byte*>(memory->data()), model_->kv_dtype(), model_->config().head_dim,
            static_cast<int32_t>(pages)};
  }

  // The bytes of a prefilled sequence in the decode engine's pool, as a transport would bring them.
  std::unique_ptr<SequenceKv> CopyKv(const SequenceKv& from) {
    auto to = std::make_unique<SequenceKv>(*decode_pool_, from.shape());
    // Where pages are short it waits, as those do who reserve them.
    EXPECT_TRUE(test::Eventually([&] { return decode_->load().parked == 0 && to->Reserve(from.num_tokens()).ok(); }));
    const auto source = from.AllPages(), target = to->AllPages();
    std::vector<std::byte> bytes(source.size() * model_->page_bytes());
    EXPECT_TRUE(from.pool().ReadPages(source, bytes.data()).ok());
    EXPECT_TRUE(decode_pool_->WritePages(target, bytes.data()).ok());
    to->set_num_tokens(from.num_tokens());
    return to;
  }

  // Of what is submitted from here on.
  DecodeOptions selection_;
  std::function<void()> on_tokens_;  // called with each step's tokens, by the thread that delivers them; may be null
  std::function<void(DecodeRequest&)> change_decode_;  // what arrives at the decode engine; may be null

  bool EventuallyRunning() {
    const auto deadline = std::chrono::steady_clock::now() + 20s;
    while (decode_->load().running == 0 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    return decode_->load().running > 0;
  }

  std::shared_ptr<Outcome> Submit(const std::vector<int32_t>& prompt, const SamplingParams& sampling,
                                  CancelFlag cancelled = std::make_shared<std::atomic<bool>>(false),
                                  SteadyTime deadline = SteadyTime::max(),
                                  const std::function<void(PrefillRequest&)>& change = nullptr) {
    auto outcome = std::make_shared<Outcome>();
    outcome->tokens.resize(sampling.num_forks);
    PrefillRequest request;
    request.tokens = prompt;
    request.sampling = sampling;
    request.cancelled = cancelled;
    request.deadline = deadline;
    if (change) change(request);
    request.on_done = [=, this, selection = selection_, watch = on_tokens_, change_decode = change_decode_](
                          const absl::Status& status, PrefillOutcome result) {
      outcome->stats = result.stats;
      outcome->first_logits = result.first_logits;
      outcome->prompt_logprobs = result.prompt_logprobs;
      if (!status.ok()) return outcome->Finish(status);
      DecodeRequest next;
      next.kv = CopyKv(*result.kv);
      next.sampling = sampling;
      next.decode = selection;
      next.prompt = prompt;
      next.first_tokens = result.first_tokens;
      next.cancelled = cancelled;
      next.deadline = deadline;
      {
        std::lock_guard lock(outcome->mutex);
        for (size_t i = 0; i < result.first_tokens.size(); ++i)
          outcome->tokens[i].push_back(result.first_tokens[i].token);
      }
      next.on_tokens = [outcome, watch](std::span<const DecodeToken> tokens) {
        if (watch) watch();
        std::lock_guard lock(outcome->mutex);
        for (const DecodeToken& t : tokens) {
          outcome->tokens[t.fork].push_back(t.token.token);
          outcome->kinds.push_back(t.step.kind);
          if (!t.token.logprob.has_value()) continue;
          outcome->logprobs.push_back(t.token.logprob->logprob);
          for (const auto& [id, logprob] : t.token.logprob->top) outcome->logprobs.push_back(logprob);
        }
        outcome->changed.notify_all();
      };
      next.on_done = [outcome](const absl::Status& s) { outcome->Finish(s); };
      if (change_decode) change_decode(next);
      if (const absl::Status submitted = decode_->Submit(std::move(next)); !submitted.ok()) outcome->Finish(submitted);
    };
    if (const absl::Status status = prefill_->Submit(std::move(request)); !status.ok()) outcome->Finish(status);
    return outcome;
  }

  // With segments, and waits.
  std::shared_ptr<Outcome> Ask(const std::vector<int32_t>& prompt, const std::function<void(PrefillRequest&)>& change,
                               int64_t max_tokens = 6) {
    auto outcome =
        Submit(prompt, Greedy(max_tokens), std::make_shared<std::atomic<bool>>(false), SteadyTime::max(), change);
    EXPECT_TRUE(outcome->Wait());
    EXPECT_TRUE(outcome->status.ok()) << outcome->status;
    return outcome;
  }

  // Until the indexes have what ended prompts leave behind: answers do not wait for that.
  void WaitUntilKept() { prefill_->WaitIdle(std::chrono::steady_clock::now() + 60s); }

  static Tokens Expected(const std::vector<int32_t>& prompt, const SamplingParams& sampling) {
    auto generator = LocalGenerator::Create(model_, {.executor = {.max_rows = 512}, .max_tokens = 4096});
    EXPECT_TRUE(generator.ok()) << generator.status();
    Tokens tokens(sampling.num_forks);
    EXPECT_TRUE((*generator)
                    ->Generate(prompt, sampling,
                               [&](int32_t fork, const SampledToken& t) {
                                 tokens[fork].push_back(t.token);
                                 return true;
                               })
                    .ok());
    return tokens;
  }

  // The answer of one process; `sampling` asks for logprobs. Forks are told apart by their order alone.
  static Answer Generate(const LocalGeneratorOptions& options, const std::vector<int32_t>& prompt,
                         const SamplingParams& sampling) {
    Answer answer;
    auto generator = LocalGenerator::Create(model_, options);
    EXPECT_TRUE(generator.ok()) << generator.status();
    if (!generator.ok()) return answer;
    const absl::Status status = (*generator)->Generate(prompt, sampling, [&](int32_t, const SampledToken& t) {
      answer.tokens.push_back(t.token);
      answer.logprobs.push_back(t.logprob->logprob);
      for (const auto& [id, logprob] : t.logprob->top) answer.logprobs.push_back(logprob);
      return true;
    });
    EXPECT_TRUE(status.ok()) << status;
    return answer;
  }

  static std::vector<int32_t> RandomPrompt(std::mt19937& random, size_t length) {
    std::vector<int32_t> prompt(length);
    for (int32_t& token : prompt) token = static_cast<int32_t>(random() % 4000);
    return prompt;
  }
  static SamplingParams Greedy(int64_t max_tokens) {
    SamplingParams sampling;
    sampling.temperature = 0;
    sampling.max_tokens = max_tokens;
    sampling.ignore_eos = true;
    return sampling;
  }
  static SamplingParams WithLogprobs(int64_t max_tokens, int32_t num_logprobs = 3) {
    SamplingParams sampling = Greedy(max_tokens);
    sampling.num_logprobs = num_logprobs;
    return sampling;
  }

  static inline std::shared_ptr<const Model> model_;
  std::unique_ptr<kernels::Buffer> prefill_memory_, decode_memory_;
  std::unique_ptr<PagePool> decode_pool_;
  std::unique_ptr<PrefillEngine> prefill_;
  std::unique_ptr<DecodeEngine> decode_;
};

// Few tokens, chosen often: choices begin in short prompts.
inline DecodeOptions Selector(const char* name, int32_t budget) {
  DecodeOptions options(name);
  options.budget = budget;
  options.recent = 16;
  options.refresh_interval = 5;
  return options;
}

inline constexpr chunk::Digest kDocs{1, 2, 3}, kOtherDocs{4, 5, 6};

inline std::vector<int32_t> Concatenate(std::initializer_list<std::vector<int32_t>> parts) {
  std::vector<int32_t> all;
  for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

}  // namespace spl::engine
