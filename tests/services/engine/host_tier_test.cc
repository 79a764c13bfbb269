// Sequences with their KV in host memory (runtime/host_tier.h): the same answers, bit for bit, as with all of it in the
// pool; more of them at once; and nothing that stays behind.
#include <algorithm>
#include <atomic>

#include "tests/services/engine/engines_fixture.h"
#include "tests/support/fake_device_backend.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

using test::SeededRandom;

// SparCas by packed keys, which the CPU serves but does not choose by itself.
DecodeOptions Packed(int32_t budget) {
  DecodeOptions options("sparcas");
  options.budget = budget;
  options.recent = 64;
  options.refresh_interval = 5;
  options.packed_keys = true;
  return options;
}

class HostTierTest : public EnginesTest {
 protected:
  struct Case {
    std::vector<int32_t> prompt;
    SamplingParams sampling;
    DecodeOptions decode;
  };
  struct Run {
    std::vector<std::shared_ptr<Outcome>> outcomes;
    size_t most_host_bytes = 0;
    HostKv::Counts rows;
    uint64_t preemptions = 0;
  };

  void TearDown() override {
    EnginesTest::TearDown();
    if (other_model_ != nullptr) std::swap(model_, other_model_);
  }
  // From here on, in this test, with this model.
  void Use(std::shared_ptr<const Model> model) {
    other_model_ = std::move(model);
    std::swap(model_, other_model_);
  }
  size_t PageBytes() const { return model_->page_bytes(); }

  // Runs all cases at the same time. Nothing of them is left afterwards.
  Run RunAll(const std::vector<Case>& cases, int64_t pool_tokens, const HostTierOptions& tier,
             DecodeEngineOptions options = {}) {
    options.host_tier = tier;
    StartPools(pool_tokens, options);
    Run run;
    std::atomic<size_t> most_host_bytes{0};
    on_tokens_ = [&] {  // one thread calls it
      most_host_bytes = std::max(most_host_bytes.load(), decode_->load().host_kv_bytes);
    };
    for (const Case& c : cases) {
      selection_ = c.decode;
      run.outcomes.push_back(Submit(c.prompt, c.sampling));
    }
    on_tokens_ = nullptr;
    for (const auto& outcome : run.outcomes) EXPECT_TRUE(outcome->Wait());
    run.most_host_bytes = most_host_bytes;
    for (const auto& outcome : run.outcomes) EXPECT_TRUE(outcome->status.ok()) << outcome->status;
    ExpectNothingLeft();
    run.rows = decode_->load().host_rows;
    run.preemptions = decode_->load().preemptions;
    return run;
  }
  void StartPools(int64_t pool_tokens, const DecodeEngineOptions& options) {
    const int64_t prefill_tokens = 24576;
    if (model_->num_ranks() == 1) return Start(prefill_tokens, pool_tokens, {}, options);
    StopAll();
    const auto memory = [&](KvMemory& to, int64_t tokens) {
      auto made = AllocateKvMemory(*model_, PagesForTokens(model_->config(), tokens));
      ASSERT_TRUE(made.ok());
      to = *std::move(made);
    };
    memory(ranks_prefill_, prefill_tokens);
    memory(ranks_decode_, pool_tokens);
    decode_pool_ = std::make_unique<PagePool>(ranks_decode_.pages, model_->backends());
    auto p = PrefillEngine::Create(model_, ranks_prefill_.pages, {});
    ASSERT_TRUE(p.ok()) << p.status();
    prefill_ = std::move(*p);
    auto d = DecodeEngine::Create(model_, *decode_pool_, options);
    ASSERT_TRUE(d.ok()) << d.status();
    decode_ = std::move(*d);
  }
  void ExpectNothingLeft() {
    EXPECT_TRUE(test::Eventually([&] { return decode_->load().host_kv_bytes == 0; }));
    EXPECT_TRUE(test::Eventually([&] { return decode_pool_->num_free() == decode_pool_->num_pages(); }));
    EXPECT_EQ(decode_->load().parked_bytes, 0u);
    decode_pool_->CheckInvariants();
  }
  static void ExpectSame(const Run& got, const Run& want) {
    ASSERT_EQ(got.outcomes.size(), want.outcomes.size());
    for (size_t i = 0; i < got.outcomes.size(); ++i) {
      EXPECT_EQ(got.outcomes[i]->tokens, want.outcomes[i]->tokens) << i;
      EXPECT_EQ(got.outcomes[i]->logprobs, want.outcomes[i]->logprobs) << i;
    }
  }
  std::vector<Case> Mixed(std::mt19937& random) {
    const auto length = [&](int least, int most) {
      return static_cast<size_t>(least) + random() % static_cast<size_t>(most - least);
    };
    std::vector<Case> cases;
    for (const int32_t budget : {64, 100, 128, 192})  // 64: recent tokens alone
      cases.push_back({RandomPrompt(random, length(450, 1000)), WithLogprobs(90), Packed(budget)});
    cases.push_back({RandomPrompt(random, 230), WithLogprobs(170), Packed(80)});  // grows into the tier
    cases.push_back({RandomPrompt(random, 1600), WithLogprobs(90), Packed(128)});
    cases.push_back({RandomPrompt(random, length(300, 500)), WithLogprobs(60), DecodeOptions("dense")});
    cases.push_back({RandomPrompt(random, length(300, 500)), WithLogprobs(60), Selector("sparcas", 64)});
    cases.push_back({RandomPrompt(random, length(300, 500)), WithLogprobs(60), Selector("quest", 64)});
    return cases;
  }
  // A hot buffer of barely more than a list: nearly every step evicts.
  HostTierOptions Tiny(int64_t tokens = 16384) {
    return {.bytes = static_cast<size_t>(PagesForTokens(model_->config(), tokens)) * PageBytes(),
            .hot_tokens = 1,
            .moved_bytes = 1,
            .pages_at_once = 1};
  }

  std::shared_ptr<const Model> other_model_;
  KvMemory ranks_prefill_{.pages = kernels::KvPoolView{}}, ranks_decode_{.pages = kernels::KvPoolView{}};
};

TEST_F(HostTierTest, AnswersHaveTheBitsOfThoseWithout) {
  std::mt19937 random = SeededRandom("host tier");
  const std::vector<Case> cases = Mixed(random);
  const Run want = RunAll(cases, 16384, {});
  EXPECT_EQ(want.most_host_bytes, 0u);
  EXPECT_EQ(want.rows.listed, 0u);
  const Run tiny = RunAll(cases, 16384, Tiny());
  ExpectSame(tiny, want);
  EXPECT_GT(tiny.most_host_bytes, 1600u / 64 * PageBytes()) << "pages were on the host";
  EXPECT_GT(tiny.rows.copied, 0u);
  EXPECT_GT(tiny.rows.listed, tiny.rows.copied);
  // Nor do larger ones change anything, or many layers at once.
  HostTierOptions large = Tiny();
  large.hot_tokens = 0;
  large.moved_bytes = size_t{1} << 30;
  const Run roomy = RunAll(cases, 16384, large);
  ExpectSame(roomy, want);
  EXPECT_GT(roomy.rows.listed, roomy.rows.copied);
}

// Compared where all sequences move with either buffer: short ones keep their pages where the buffer is large.
TEST_F(HostTierTest, LargerBuffersCopyFewerRows) {
  std::mt19937 random = SeededRandom("larger buffers");
  std::vector<Case> cases;
  for (const int32_t budget : {100, 128})
    cases.push_back({RandomPrompt(random, 1200 + random() % 600), WithLogprobs(90), Packed(budget)});
  const auto copied_of = [&](int32_t hot_tokens) {
    HostTierOptions tier = Tiny();
    tier.hot_tokens = hot_tokens;
    const Run run = RunAll(cases, 16384, tier);
    EXPECT_GT(run.rows.listed, 0u) << hot_tokens;
    return static_cast<double>(run.rows.copied) / static_cast<double>(std::max<uint64_t>(run.rows.listed, 1));
  };
  const double least = copied_of(1), larger = copied_of(256), largest = copied_of(512);
  EXPECT_LT(larger, least);
  EXPECT_LT(largest, larger);
}

TEST_F(HostTierTest, WhereHostMemoryEndsSequencesStayOnTheDevice) {
  std::mt19937 random = SeededRandom("little host memory");
  const std::vector<Case> cases = Mixed(random);
  const Run want = RunAll(cases, 16384, {});
  // One page; some layers of one sequence; about one sequence.
  for (const int64_t tokens : {int64_t{1}, int64_t{300}, int64_t{1200}}) {
    const HostTierOptions tier = Tiny(tokens);
    const Run got = RunAll(cases, 16384, tier);
    ExpectSame(got, want);
    EXPECT_LE(got.most_host_bytes, tier.bytes);
    if (tokens > 1) {
      EXPECT_GT(got.most_host_bytes, 0u) << tokens;
    }
  }
}

// Slots are the sequences' own pages here: there is no room for others.
TEST_F(HostTierTest, MoreSequencesRunInTheSamePool) {
  std::mt19937 random = SeededRandom("more sequences");
  constexpr int64_t kPool = 2 * 2300;
  ASSERT_GT(3 * TokensToBegin(Packed(128), 1900), kPool) << "two of them have room with all of their pages";
  HostTierOptions tier = Tiny();
  tier.moved_bytes = size_t{1} << 20;
  StartPools(kPool, {.host_tier = tier});
  selection_ = Packed(128);
  std::vector<std::shared_ptr<Outcome>> outcomes;
  std::vector<CancelFlag> flags;
  for (int i = 0; i < 4; ++i) {
    flags.push_back(std::make_shared<std::atomic<bool>>(false));
    outcomes.push_back(Submit(RandomPrompt(random, 1900), Greedy(10000), flags.back()));
  }
  EXPECT_TRUE(test::Eventually([&] { return decode_->load().running == 4; }, 60s));
  for (const CancelFlag& flag : flags) *flag = true;
  decode_->Wake();
  for (const auto& outcome : outcomes) EXPECT_TRUE(outcome->Wait());
  ExpectNothingLeft();
}

TEST_F(HostTierTest, PreemptedSequencesComeBackWithTheirSlots) {
  std::mt19937 random = SeededRandom("preempted from the host tier");
  std::vector<Case> cases;
  for (int i = 0; i < 4; ++i)
    cases.push_back({RandomPrompt(random, 500 + random() % 100), WithLogprobs(400), Packed(128)});
  const Run want = RunAll(cases, 16384, {});
  // Slots, dense layers, packed keys and recent pages outgrow the pool.
  Run got;
  uint64_t preemptions = 0;
  for (const int64_t pool : {1400, 1900}) {
    got = RunAll(cases, pool, {.bytes = Tiny().bytes, .hot_tokens = 192});
    ExpectSame(got, want);
    EXPECT_GT(got.rows.listed, 0u);
    preemptions += got.preemptions;
  }
  EXPECT_GT(preemptions, 0u);
}

TEST_F(HostTierTest, SharedPagesAreNotOverwritten) {
  std::mt19937 random = SeededRandom("shared pages");
  const std::vector<Case> cases = {{RandomPrompt(random, 900), WithLogprobs(120), Packed(96)}};
  const Run want = RunAll(cases, 16384, {});
  // Another owner of the prompt's pages, as a kept conversation is: it reads them at the end.
  std::unique_ptr<SequenceKv> other;
  std::vector<std::byte> before;
  change_decode_ = [&](DecodeRequest& request) {
    other = std::make_unique<SequenceKv>(*decode_pool_, request.kv->shape());
    other->AppendLeading(*request.kv, 900 / kernels::kPageTokens);
    const auto pages = other->AllPages();
    before.resize(pages.size() * PageBytes());
    ASSERT_TRUE(decode_pool_->ReadPages(pages, before.data()).ok());
    request.on_pages_back = [](const SequenceKv&) { ADD_FAILURE() << "pages of the host were offered"; };
  };
  StartPools(16384, {.host_tier = Tiny()});
  selection_ = cases[0].decode;
  const auto outcome = Submit(cases[0].prompt, cases[0].sampling);
  ASSERT_TRUE(outcome->Wait());
  EXPECT_TRUE(outcome->status.ok()) << outcome->status;
  EXPECT_EQ(outcome->tokens, want.outcomes[0]->tokens);
  EXPECT_EQ(outcome->logprobs, want.outcomes[0]->logprobs);
  EXPECT_TRUE(test::Eventually([&] { return decode_->load().host_rows.listed > 0; }));
  std::vector<std::byte> after(before.size());
  ASSERT_TRUE(decode_pool_->ReadPages(other->AllPages(), after.data()).ok());
  EXPECT_TRUE(before == after);
  other.reset();
  ExpectNothingLeft();
}

TEST_F(HostTierTest, CancelledSequencesLeaveNothingBehind) {
  std::mt19937 random = SeededRandom("cancelled in the host tier");
  StartPools(16384, {.host_tier = Tiny()});
  std::vector<std::shared_ptr<Outcome>> outcomes;
  std::vector<CancelFlag> flags;
  selection_ = Packed(96);
  for (int i = 0; i < 4; ++i) {
    flags.push_back(std::make_shared<std::atomic<bool>>(false));
    outcomes.push_back(Submit(RandomPrompt(random, 700), Greedy(2000), flags.back()));
  }
  ASSERT_TRUE(test::Eventually([&] { return decode_->load().running == 4 && decode_->load().host_kv_bytes > 0; }));
  for (const CancelFlag& flag : flags) *flag = true;
  decode_->Wake();
  for (const auto& outcome : outcomes) {
    ASSERT_TRUE(outcome->Wait());
    EXPECT_EQ(outcome->status.code(), absl::StatusCode::kCancelled);
  }
  ExpectNothingLeft();
}

// A sequence that may have to attend to everything keeps its pages.
TEST_F(HostTierTest, OtherSequencesStayInThePool) {
  std::mt19937 random = SeededRandom("not of the host tier");
  DecodeOptions adaptive = Packed(64);
  adaptive.selector = "adaptive";
  SamplingParams two = WithLogprobs(40);
  two.num_forks = 2;
  const auto prompt = RandomPrompt(random, 600);
  const std::vector<Case> cases = {{prompt, WithLogprobs(40), adaptive},
                                   {prompt, two, Packed(64)},
                                   {prompt, WithLogprobs(40), Selector("sparcas", 64)},
                                   {prompt, WithLogprobs(40), Selector("loopserve", 64)},
                                   {prompt, WithLogprobs(40), Packed(400)},  // it is not long enough
                                   {prompt, WithLogprobs(40), DecodeOptions("dense")}};
  EXPECT_EQ(RunAll(cases, 16384, Tiny()).most_host_bytes, 0u);
}

// With such devices, instead of the suite's.
std::shared_ptr<const Model> ModelOn(Devices devices) {
  auto model = Model::Load(test::kTinyModel, std::move(devices), {.kv_dtype = test::KvType()});
  EXPECT_TRUE(model.ok()) << model.status();
  return *std::move(model);
}

TEST_F(HostTierTest, StepsThatStartEarlyChangeNothing) {
  // Its model runs on a host backend that pretends to be a device.
  if (test::OnGpu()) GTEST_SKIP() << "a model of the host";
  std::mt19937 random = SeededRandom("host tier, early steps");
  const std::vector<Case> cases = Mixed(random);
  Use(ModelOn({std::make_shared<test::FakeDeviceBackend>()}));
  DecodeEngineOptions early;
  early.async_scheduling = true;
  early.measure_step_costs = false;
  const Run want = RunAll(cases, 16384, {}, early);
  const Run got = RunAll(cases, 16384, Tiny(), early);
  ExpectSame(got, want);
  EXPECT_GT(got.rows.copied, 0u);
}

TEST_F(HostTierTest, SeveralRanksChangeNothing) {
  // Its ranks are of the host: this takes no second GPU.
  if (test::OnGpu()) GTEST_SKIP() << "a model of the host";
  std::mt19937 random = SeededRandom("host tier, ranks");
  const std::vector<Case> cases = Mixed(random);
  Use(ModelOn(*test::DevicesOf("cpu", 2)));
  const Run want = RunAll(cases, 16384, {});
  const Run got = RunAll(cases, 16384, Tiny());
  ExpectSame(got, want);
  EXPECT_GT(got.rows.copied, 0u);
}

}  // namespace
}  // namespace spl::engine
