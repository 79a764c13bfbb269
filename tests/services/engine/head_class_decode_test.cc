// Decoding with head classes: the same tokens and probabilities whether a sequence keeps everything or only what its
// heads see, alone or beside sequences of other classes, and the plans that a device is told.
#include "services/engine/methods/selection_methods.h"
#include "services/engine/selection/head_classes_selector.h"
#include "tests/services/engine/engines_fixture.h"
#include "tests/support/fake_device_backend.h"
#include "tests/support/forwarding_session.h"

namespace spl::engine {
namespace {

using testing::HasSubstr;

std::shared_ptr<const StreamClasses> Spread(const Model& model, double global_share, int32_t window, int32_t sinks) {
  const HeadPreset preset{.name = "test", .global_share = global_share, .window = window, .sinks = sinks};
  return ServedClasses(HeadClassMap::Spread(model.config().num_layers, model.config().num_kv_heads, preset));
}

class HeadClassDecodeTest : public EnginesTest {
 protected:
  static Answer Local(const std::vector<int32_t>& prompt, std::shared_ptr<const StreamClasses> classes, bool keep_all,
                      int64_t max_tokens, int32_t forks = 1) {
    LocalGeneratorOptions options;
    options.max_tokens = 4096;
    options.decode_classes = std::move(classes);
    options.keep_all_kv = keep_all;
    SamplingParams sampling = WithLogprobs(max_tokens, 5);
    sampling.num_forks = forks;
    if (forks > 1) {
      sampling.temperature = 1;
      sampling.seed = 7;
    }
    return Generate(options, prompt, sampling);
  }
};

TEST_F(HeadClassDecodeTest, WhatIsKeptDecidesNothing) {
  std::mt19937 random(11);
  for (const auto& [length, window, sinks] : std::vector<std::tuple<size_t, int32_t, int32_t>>{
           {700, 64, 4}, {513, 100, 64}, {448, 256, 64}, {90, 256, 64}, {640, 1, 0}}) {
    const auto prompt = RandomPrompt(random, length);
    const auto classes = Spread(*model_, 0.3, window, sinks);
    const Answer view = Local(prompt, classes, /*keep_all=*/true, 150);
    EXPECT_EQ(Local(prompt, classes, /*keep_all=*/false, 150), view) << length << " " << window;
    const bool all_seen = length + 150 <= static_cast<size_t>(window);
    EXPECT_EQ(view == Local(prompt, nullptr, true, 150), all_seen) << length << " " << window;
  }
}

TEST_F(HeadClassDecodeTest, ForksKeepToTheirClasses) {
  std::mt19937 random(12);
  const auto prompt = RandomPrompt(random, 600);
  const auto classes = Spread(*model_, 0.25, 96, 16);
  EXPECT_EQ(Local(prompt, classes, false, 70, 3), Local(prompt, classes, true, 70, 3));
}

TEST_F(HeadClassDecodeTest, AWindowBeyondTheTextIsDense) {
  std::mt19937 random(13);
  const auto prompt = RandomPrompt(random, 300);
  EXPECT_EQ(Local(prompt, Spread(*model_, 0, 4096, 0), false, 40), Local(prompt, nullptr, true, 40));
}

TEST_F(HeadClassDecodeTest, SelectorsSayWhatTheyNeed) {
  const ModelConfig& config = model_->config();
  const auto classes = Spread(*model_, 0.5, 256, 64);
  EXPECT_EQ((*MakeTokenSelector("", config, classes))->name(), "head_classes");
  EXPECT_EQ((*MakeTokenSelector("auto", config, nullptr))->name(), "dense");
  const auto dense = MakeTokenSelector("dense", config, classes);
  EXPECT_EQ(dense.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(dense.status().ToString(), HasSubstr("full_kv"));
  EXPECT_EQ(MakeTokenSelector("head_classes", config, nullptr).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(MakeTokenSelector("other", config, classes).status().code(), absl::StatusCode::kUnimplemented);
  HeadClassesSelector selector(config, classes), same(config, Spread(*model_, 0.5, 256, 64));
  EXPECT_EQ(selector.plan_key(), same.plan_key());
  EXPECT_TRUE(selector.shares_plan());
  HeadClassesSelector other(config, Spread(*model_, 0.5, 256, 65));
  EXPECT_NE(selector.plan_key(), other.plan_key());
  size_t local = 0;
  while ((*classes)[local].is_global) ++local;
  const std::vector<int32_t> heads = {static_cast<int32_t>(local)};
  HeadClassesSelector restored(config, WithRestored(classes, heads));
  EXPECT_NE(restored.plan_key(), selector.plan_key());
  EXPECT_FALSE(restored.shares_plan());
  const auto layer = static_cast<int32_t>(local) / config.num_kv_heads;
  const auto head = static_cast<int32_t>(local) % config.num_kv_heads;
  EXPECT_EQ(selector.Select(layer, head).rule, kernels::VisibilityRule::kBand);
  EXPECT_EQ(restored.Select(layer, head).rule, kernels::VisibilityRule::kFull);
}

TEST(ClassVisibility, TheShorterOfTwoWindowsCounts) {
  using kernels::VisibilityRule;
  const kernels::HeadVisibility model{.rule = VisibilityRule::kBand, .num_sinks = 0, .window = 512};
  const auto visible = ClassVisibility({false, 256, 64}, model);
  EXPECT_EQ(visible.window, 256);
  EXPECT_EQ(visible.num_sinks, 0) << "the model itself would not see them";
  EXPECT_EQ(ClassVisibility({false, 1024, 64}, model).window, 512);
  EXPECT_EQ(ClassVisibility({false, 1024, 64}, model).num_sinks, 0);
  EXPECT_EQ(ClassVisibility({}, model).window, 512);
  EXPECT_EQ(ClassVisibility({}, {}).rule, VisibilityRule::kFull);
  EXPECT_EQ(ClassVisibility({false, 256, 64}, {}).window, 256);
}

// Sequences of different classes in one batch of the decode engine, dense ones and ones with restored heads among them.
TEST_F(HeadClassDecodeTest, SequencesOfDifferentClassesShareABatch) {
  Start();
  std::mt19937 random(14);
  const std::vector<std::shared_ptr<const StreamClasses>> kinds = {nullptr, Spread(*model_, 0.5, 128, 64),
                                                                   Spread(*model_, 0.1, 64, 4), nullptr};
  struct One {
    std::vector<int32_t> prompt;
    std::shared_ptr<const StreamClasses> classes;
    std::shared_ptr<Outcome> outcome = std::make_shared<Outcome>();
  };
  std::vector<One> all;
  for (size_t i = 0; i < 8; ++i) {
    One one{RandomPrompt(random, 200 + 70 * i), kinds[i % kinds.size()]};
    if (i >= 4 && one.classes != nullptr) {
      int32_t local = 20;
      while ((*one.classes)[static_cast<size_t>(local)].is_global) ++local;
      one.classes = WithRestored(one.classes, {&local, 1});
    }
    all.push_back(one);
  }
  for (One& one : all) {
    PrefillRequest request;
    request.tokens = one.prompt;
    request.sampling = Greedy(60);
    one.outcome->tokens.resize(1);
    request.on_done = [this, &one](const absl::Status& status, PrefillOutcome result) {
      if (!status.ok()) return one.outcome->Finish(status);
      DecodeRequest next;
      next.kv = CopyKv(*result.kv);
      if (one.classes != nullptr) next.kv->Compress(one.classes);
      next.sampling = Greedy(60);
      next.first_tokens = result.first_tokens;
      one.outcome->tokens[0].push_back(result.first_tokens[0].token);
      next.on_tokens = [outcome = one.outcome](std::span<const DecodeToken> tokens) {
        for (const DecodeToken& t : tokens) outcome->tokens[0].push_back(t.token.token);
      };
      next.on_done = [outcome = one.outcome](const absl::Status& s) { outcome->Finish(s); };
      if (const absl::Status submitted = decode_->Submit(std::move(next)); !submitted.ok())
        one.outcome->Finish(submitted);
    };
    ASSERT_TRUE(prefill_->Submit(std::move(request)).ok());
  }
  for (size_t i = 0; i < all.size(); ++i) {
    ASSERT_TRUE(all[i].outcome->Wait());
    ASSERT_TRUE(all[i].outcome->status.ok()) << all[i].outcome->status;
    EXPECT_EQ(all[i].outcome->tokens[0], Local(all[i].prompt, all[i].classes, true, 60).tokens) << i;
  }
  StopAll();
  EXPECT_EQ(decode_pool_->num_free(), decode_pool_->num_pages());
  decode_pool_->CheckInvariants();
}

// A device that is told plans as the CUDA session is, and compares them with what each call says.
class PlanCheckingBackend final : public test::FakeDeviceBackend {
 public:
  struct Seen {
    int num_uniform = 0, num_staged = 0, num_told = 0;
  };
  mutable Seen seen;

  absl::StatusOr<std::unique_ptr<kernels::Session>> NewSession(const kernels::SessionOptions& options) const override {
    auto inner = FakeDeviceBackend::NewSession(options);
    if (!inner.ok()) return inner.status();
    return std::make_unique<PlanSession>(*std::move(inner), options, seen);
  }
  absl::Status DecodeAttention(const kernels::KernelContext& ctx,
                               const kernels::DecodeAttentionArgs& a) const override {
    auto& session = static_cast<PlanSession&>(*ctx.session);
    const auto heads = static_cast<size_t>(a.shape.num_kv_heads);
    EXPECT_EQ(a.staged_plans, session.staged);
    for (size_t i = 0; i < a.streams.size(); ++i) {
      const auto& said = a.streams[i].visibility;
      const auto& known =
          a.staged_plans
              ? session.plans.at(session.order[i / heads]).second[static_cast<size_t>(a.layer) * heads + i % heads]
              : a.streams[i % heads].visibility;
      EXPECT_TRUE(said.rule == known.rule && said.window == known.window && said.num_sinks == known.num_sinks)
          << "sequence " << i / heads << " head " << i % heads;
    }
    ++(a.staged_plans ? seen.num_staged : seen.num_uniform);
    return FakeDeviceBackend::DecodeAttention(session.inner->context(), a);
  }

 private:
  struct PlanSession final : test::ForwardingSession {
    PlanSession(std::unique_ptr<kernels::Session> s, const kernels::SessionOptions& o, Seen& seen)
        : ForwardingSession(std::move(s)), plan_size(static_cast<size_t>(o.num_layers) * o.num_kv_heads), seen(seen) {}
    absl::Status Stage(const kernels::BatchArgs& batch) override {
      staged = batch.staged_plans;
      order.clear();
      for (const kernels::BatchSequence& sequence : batch.sequences) {
        order.push_back(sequence.kv_id);
        if (!staged || HasPlan(sequence.kv_id, sequence.plan_key)) continue;
        EXPECT_EQ(sequence.plan.size(), plan_size);
        plans[sequence.kv_id] = {sequence.plan_key, {sequence.plan.begin(), sequence.plan.end()}};
        ++seen.num_told;
      }
      return inner->Stage(batch);
    }
    bool HasPlan(uint64_t kv_id, uint64_t plan_key) const override {
      const auto it = plans.find(kv_id);
      return it != plans.end() && it->second.first == plan_key;
    }
    const size_t plan_size;
    Seen& seen;
    bool staged = false;
    std::vector<uint64_t> order;
    std::map<uint64_t, std::pair<uint64_t, std::vector<kernels::HeadVisibility>>> plans;
  };
};

TEST(StagedPlans, ADeviceIsToldPlansOnceAndOnlyWhenTheyDiffer) {
  for (const int ranks : {1, 2}) {
    Devices devices;
    std::vector<std::shared_ptr<PlanCheckingBackend>> backends;
    for (int r = 0; r < ranks; ++r) devices.push_back(backends.emplace_back(std::make_shared<PlanCheckingBackend>()));
    auto model = *Model::Load(test::kTinyModel, devices);
    auto memory = *AllocateKvMemory(*model, PagesForTokens(model->config(), 4096));
    PagePool pool(memory.pages, model->backends());
    auto executor = *ParallelExecutor::Create(model, memory.pages, {.num_threads = 1, .max_rows = 8});
    const auto classes = Spread(*model, 0.3, 70, 4), more = Spread(*model, 0.3, 90, 4);
    struct Row {
      std::shared_ptr<const StreamClasses> classes;
      std::unique_ptr<SequenceKv> kv;
      std::unique_ptr<TokenSelector> selector;
    };
    std::vector<Row> rows;
    for (const auto& c : {std::shared_ptr<const StreamClasses>(), classes, more, classes}) {
      Row& row = rows.emplace_back();
      row.kv = std::make_unique<SequenceKv>(pool, KvShapeOf(model->config()), c);
      row.selector = *MakeTokenSelector("", model->config(), c);
    }
    const auto step = [&](std::initializer_list<size_t> which) {
      std::vector<DecodeRow> batch;
      for (const size_t i : which) {
        ASSERT_TRUE(rows[i].kv->Reserve(rows[i].kv->num_tokens() + 1).ok());
        batch.push_back({5, rows[i].kv.get(), rows[i].selector.get()});
      }
      ASSERT_TRUE(executor->Decode(batch).ok());
      ASSERT_TRUE(executor->Argmax().ok());
      for (const size_t i : which) rows[i].kv->set_num_tokens(rows[i].kv->num_tokens() + 1);
    };
    PlanCheckingBackend::Seen& seen = backends[static_cast<size_t>(ranks - 1)]->seen;
    const int layers = model->config().num_layers;
    step({1, 3});
    EXPECT_EQ(seen.num_uniform, layers);
    EXPECT_EQ(seen.num_told, 0) << "equal plans are part of the call";
    step({1, 2});
    EXPECT_EQ(seen.num_staged, layers);
    EXPECT_EQ(seen.num_told, 2);
    step({0, 1, 2, 3});
    step({0, 1, 2, 3});
    EXPECT_EQ(seen.num_staged, 3 * layers);
    EXPECT_EQ(seen.num_told, 4);
    step({0});
    EXPECT_EQ(seen.num_uniform, 2 * layers);
    // One with a restored head is told even when it is alone: no recording is worth its while.
    int32_t local = 20;
    while ((*classes)[static_cast<size_t>(local)].is_global) ++local;
    rows[3].selector = *MakeTokenSelector("", model->config(), WithRestored(classes, {&local, 1}));
    step({3});
    EXPECT_EQ(seen.num_staged, 4 * layers);
    EXPECT_EQ(seen.num_told, 5);
  }
}

}  // namespace
}  // namespace spl::engine
