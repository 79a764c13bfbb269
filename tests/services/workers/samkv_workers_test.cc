// Requests with samkv through a prefill and a decode worker: tokens are those of one process, and the decode worker
// keeps what the layers keep.
#include "services/engine/methods/recovery_methods.h"
#include "services/engine/methods/selection_methods.h"
#include "services/engine/runtime/prompt_replay.h"
#include "services/engine/runtime/prompt_run.h"
#include "tests/services/workers/workers_fixture.h"

namespace spl {
namespace {

class SamKvWorkersTest : public WorkersTest {
 protected:
  struct Documents {
    std::vector<std::vector<int32_t>> texts;
    std::vector<int32_t> prompt;
    std::vector<engine::PositionRange> ranges;
  };
  static Documents MakeDocuments() {
    Documents documents;
    documents.prompt = Prompt(1, 10);
    for (const size_t length : {700, 650, 800}) {
      documents.texts.push_back(Prompt(static_cast<uint32_t>(length), length));
      const auto begin = static_cast<int32_t>(documents.prompt.size());
      documents.ranges.push_back({begin, begin + static_cast<int32_t>(length)});
      documents.prompt.insert(documents.prompt.end(), documents.texts.back().begin(), documents.texts.back().end());
    }
    const auto question = Prompt(2, 25);
    documents.prompt.insert(documents.prompt.end(), question.begin(), question.end());
    return documents;
  }
  void Mark(const std::vector<engine::PositionRange>& ranges) {
    segments_.clear();
    for (const engine::PositionRange& range : ranges) {
      v1::TokenSegment& segment = segments_.emplace_back();
      segment.set_begin(static_cast<uint32_t>(range.begin));
      segment.set_end(static_cast<uint32_t>(range.end));
      segment.set_namespace_key(std::string(32, 'd'));
    }
  }
  // Computes each document by itself, which makes it reusable.
  void Publish(const Documents& documents) {
    const v1::ReuseOptions reuse = reuse_;
    reuse_.Clear();
    reuse_.set_policy("exact");
    for (const auto& text : documents.texts) {
      Mark({{0, static_cast<int32_t>(text.size())}});
      const Result result = Generate(text, Sampling(1));
      ASSERT_TRUE(result.run.ok()) << result.run;
    }
    reuse_ = reuse;
    Mark(documents.ranges);
  }

  // The same in one process, and the pages that its sequence has behind the prompt.
  struct Alone {
    std::vector<int32_t> tokens;
    int64_t pages = 0;
    double kept_share = 1;
  };
  Alone RunAlone(const Documents& documents, int steps) { return RunAlone(documents, steps, {"auto"})[0]; }
  // With each of these decode methods, behind one prefill; once for all the ways that KV may go.
  std::vector<Alone> RunAlone(const Documents& documents, int steps, const std::vector<const char*>& methods) {
    static std::map<std::tuple<const engine::Model*, std::string, int, std::string>, std::vector<Alone>> known;
    reuse_.clear_decode();
    std::string names;
    for (const char* method : methods) names += std::string(method) + " ";
    const auto [it, is_new] = known.try_emplace({model_.get(), reuse_.SerializeAsString(), steps, names});
    if (is_new) it->second = Compute(documents, steps, methods);
    reuse_.clear_decode();
    return it->second;
  }
  std::vector<Alone> Compute(const Documents& documents, int steps, const std::vector<const char*>& methods) {
    const engine::ModelConfig& config = model_->config();
    auto memory = engine::AllocateKvMemory(*model_, engine::PagesForTokens(config, 8192));
    EXPECT_TRUE(memory.ok());
    engine::PagePool pool(memory->pages, model_->backends());
    auto executor = engine::ParallelExecutor::Create(model_, memory->pages, {.max_rows = 512});
    EXPECT_TRUE(executor.ok()) << executor.status();
    int32_t last_row = 0;
    const auto run_all = [&](engine::PromptRun& run) {
      EXPECT_TRUE(run.Begin(**executor).ok());
      while (!run.done()) {
        const engine::PrefillSlice slice = run.Next(512);
        last_row = static_cast<int32_t>(slice.tokens.size()) - 1;
        EXPECT_TRUE((*executor)->Prefill({&slice, 1}, run.layers()).ok());
        EXPECT_TRUE(run.Finish(**executor).ok());
      }
    };
    std::vector<std::unique_ptr<engine::SequenceKv>> sources;
    std::vector<engine::SegmentHit> hits;
    for (size_t i = 0; i < documents.texts.size(); ++i) {
      const auto& text = documents.texts[i];
      sources.push_back(std::make_unique<engine::SequenceKv>(pool, engine::KvShapeOf(config)));
      EXPECT_TRUE(sources.back()->Reserve(static_cast<int64_t>(text.size())).ok());
      auto exact = engine::MakeRecoveryPolicy({.policy = "exact"}, config);
      engine::PromptRun run(text, {}, *sources.back(), **exact);
      run_all(run);
      hits.push_back(
          {std::make_shared<engine::SegmentSource>(*sources.back(), 0, text, engine::SourceContext{.isolated = true}),
           0, documents.ranges[i].begin, documents.ranges[i].size()});
    }
    engine::SequenceKv kv(pool, engine::KvShapeOf(config));
    EXPECT_TRUE(kv.Reserve(static_cast<int64_t>(documents.prompt.size())).ok());
    auto policy = engine::MakeRecoveryPolicy(wire::FromProto(reuse_), config);
    EXPECT_TRUE(policy.ok()) << policy.status();
    engine::PromptRun run(documents.prompt, hits, kv, **policy);
    run_all(run);
    EXPECT_TRUE((*executor)->ComputeLogits({&last_row, 1}).ok());
    const int32_t first_token = (*executor)->Argmax().value()[0];
    std::vector<int32_t> prompt = documents.prompt;
    if (!run.only().empty()) {
      kv.Truncate(kv.num_tokens());
      prompt.clear();
      for (const engine::PositionRange& range : run.only())
        prompt.insert(prompt.end(), documents.prompt.begin() + range.begin, documents.prompt.begin() + range.end);
    } else {
      kv.KeepOnly(std::make_shared<engine::KeptTokens>(
          engine::KeptTokens{static_cast<int32_t>(prompt.size()), {run.kept().begin(), run.kept().end()}}));
    }
    std::vector<Alone> all;
    for (const char* method : methods) {
      reuse_.set_decode(method);
      auto fork = kv.Fork();
      EXPECT_TRUE(fork.ok()) << fork.status();
      all.push_back({{first_token}, kv.num_pages(), run.kept_share()});
      DecodeAlone(**executor, pool, **fork, prompt, steps, all.back().tokens);
    }
    return all;
  }

  // Steps behind the last of `tokens`, which they are added to.
  void DecodeAlone(engine::ParallelExecutor& executor, engine::PagePool& pool, engine::SequenceKv& kv,
                   const std::vector<int32_t>& prompt, int steps, std::vector<int32_t>& tokens) {
    auto selector = engine::MakeSelectorFor(kv, wire::DecodeOptionsOf(reuse_), *model_);
    EXPECT_TRUE(selector.ok()) << selector.status();
    auto compact = engine::MakeCompactPages(**selector, *model_, pool, kv.num_tokens());
    EXPECT_TRUE(compact.ok()) << compact.status();
    EXPECT_TRUE(engine::BeginLists(*model_, pool, **selector, kv.num_tokens(), compact->get()).ok());
    if (engine::PromptSelector* const of_prompt = (*selector)->of_prompt(); of_prompt != nullptr) {
      EXPECT_TRUE((*compact)->Reserve(kv.num_tokens() + 1).ok());
      auto chosen = engine::ChooseOfPrompt(executor, prompt, kv, *of_prompt);
      EXPECT_TRUE(chosen.ok()) << chosen.status();
      EXPECT_TRUE(engine::KeepPositions(*model_, pool, *chosen, kv.num_tokens(), *of_prompt, **compact).ok());
    }
    for (int step = 1; step < steps; ++step) {
      EXPECT_TRUE(kv.Reserve(kv.num_tokens() + 1).ok());
      if (*compact != nullptr) {
        EXPECT_TRUE((*compact)->Reserve(kv.num_tokens() + 1).ok());
      }
      const engine::DecodeRow row{tokens.back(), &kv, selector->get(), compact->get()};
      const absl::Status status = executor.Decode({&row, 1});
      EXPECT_TRUE(status.ok()) << status;
      kv.set_num_tokens(kv.num_tokens() + 1);
      tokens.push_back(executor.Argmax().value()[0]);
    }
  }
};

// What does not depend on whether each worker has a pool of its own.
class SamKvTokensTest : public SamKvWorkersTest {};

TEST_P(SamKvTokensTest, TokensAreThoseOfOneProcess) {
  const Documents documents = MakeDocuments();
  reuse_.set_policy("samkv");
  reuse_.mutable_samkv()->set_budget_ratio(0.4);
  Publish(documents);
  struct Options {
    const char *choose, *recompute;
  };
  for (const auto& [choose, recompute] :
       {Options{"", ""}, Options{"recovered", "samkv"}, Options{"attention", "samkv"}, Options{"attention", "none"},
        Options{"attention", "sparsex"}, Options{"attention", "attended"}, Options{"means", "attended"}}) {
    const bool blends = std::string(choose) == "attention" && std::string(recompute) != "sparsex";
    for (const bool fusion : {false, true}) {
      if (fusion && !blends) continue;
      SCOPED_TRACE(choose);
      reuse_.mutable_samkv()->set_choose(choose);
      reuse_.mutable_samkv()->set_recompute(recompute);
      reuse_.mutable_samkv()->set_fusion(fusion);
      const Alone alone = RunAlone(documents, 20);
      const Result result = Generate(documents.prompt, Sampling(20));
      ASSERT_TRUE(result.run.ok()) << result.run;
      ASSERT_TRUE(result.stream.ok()) << result.stream;
      EXPECT_EQ(result.tokens, alone.tokens) << recompute << ", fusion " << fusion;
      EXPECT_EQ(result.receipt.reuse_policy(), "samkv");
      EXPECT_EQ(result.receipt.decode_selector(), "kept_tokens");
      EXPECT_DOUBLE_EQ(result.receipt.samkv().kept_share(), alone.kept_share);
      EXPECT_LT(result.receipt.samkv().kept_share(), 1);
      EXPECT_EQ(result.receipt.aligned_tokens(), 700u + 650 + 800);
      // Sent is what is decoded with, in whole pages.
      EXPECT_EQ(result.receipt.bytes_moved(),
                GetParam().in_place() ? 0 : static_cast<uint64_t>(alone.pages) * model_->page_bytes());
      EXPECT_LT(alone.pages, engine::PagesForTokens(model_->config(), static_cast<int64_t>(documents.prompt.size())));
    }
  }
}

// Every way to decode, over what is kept; what was reserved for lists and compact keys before it was known what is
// kept comes back with all the rest.
TEST_P(SamKvWorkersTest, EverySelectorChoosesAmongWhatIsKept) {
  const Documents documents = MakeDocuments();
  reuse_.set_policy("samkv");
  reuse_.mutable_samkv()->set_budget_ratio(0.4);
  reuse_.mutable_decoding()->set_decode_budget(128);
  Publish(documents);
  reserve_with_tokens_ = true;
  const std::vector<const char*> methods = {"sparcas", "quest", "loopserve", "streaming", "snapkv", "adakv", "h2o"};
  const std::vector<Alone> all = RunAlone(documents, 24, methods);
  for (size_t i = 0; i < methods.size(); ++i) {
    const char* const name = methods[i];
    const Alone& alone = all[i];
    reuse_.set_decode(name);
    const Result result = Generate(documents.prompt, Sampling(24));
    ASSERT_TRUE(result.run.ok()) << name << ": " << result.run;
    ASSERT_TRUE(result.stream.ok()) << name << ": " << result.stream;
    EXPECT_EQ(result.tokens, alone.tokens) << name;
    EXPECT_EQ(result.receipt.decode_selector(), name);
    EXPECT_LT(result.receipt.samkv().kept_share(), 1);
    EXPECT_EQ(decode_->pool().num_free(), decode_->pool().num_pages()) << name;
  }
}

// compact: the decode worker has a shorter prompt, whatever chooses of it, and gives back what was reserved for the
// rest.
TEST_P(SamKvWorkersTest, CompactPromptsAreShorter) {
  const Documents documents = MakeDocuments();
  reuse_.set_policy("samkv");
  reuse_.mutable_samkv()->set_budget_ratio(0.4);
  reuse_.mutable_decoding()->set_decode_budget(128);
  reuse_.mutable_samkv()->set_compact(true);
  Publish(documents);
  for (const auto& [choose, recompute] :
       {std::pair{"", ""}, std::pair{"attention", "samkv"}, std::pair{"attention", "none"}}) {
    reuse_.mutable_samkv()->set_choose(choose);
    reuse_.mutable_samkv()->set_recompute(recompute);
    const std::vector<const char*> methods = {"auto", "sparcas", "snapkv"};
    const std::vector<Alone> all = RunAlone(documents, 24, methods);
    for (size_t i = 0; i < methods.size(); ++i) {
      SCOPED_TRACE(std::string(choose) + ", " + methods[i]);
      reserve_with_tokens_ = i == 2;
      reuse_.set_decode(methods[i]);
      const Result result = Generate(documents.prompt, Sampling(24));
      ASSERT_TRUE(result.run.ok()) << result.run;
      ASSERT_TRUE(result.stream.ok()) << result.stream;
      EXPECT_EQ(result.tokens, all[i].tokens);
      EXPECT_EQ(result.receipt.decode_selector(), i == 0 ? "dense" : methods[i]);
      EXPECT_DOUBLE_EQ(result.receipt.samkv().kept_share(), all[i].kept_share);
      EXPECT_LT(result.receipt.samkv().kept_share(), 0.6);
      EXPECT_EQ(result.receipt.bytes_moved(), static_cast<uint64_t>(all[i].pages) * model_->page_bytes());
      EXPECT_LT(2 * all[i].pages,
                engine::PagesForTokens(model_->config(), static_cast<int64_t>(documents.prompt.size())));
      EXPECT_EQ(decode_->pool().num_free(), decode_->pool().num_pages());
    }
  }
}

// A prompt of which nothing is known yet leaves nothing out: it decodes as behind any other policy, with other compact
// pages than were reserved (`adaptive` has none behind tokens that were left out).
TEST_P(SamKvWorkersTest, EverySelectorChoosesFromAPromptWithoutCopies) {
  reuse_.mutable_decoding()->set_decode_budget(128);
  uint32_t seed = 100;
  for (const char* const decode : {"auto", "sparcas", "adaptive", "quest", "loopserve", "snapkv"}) {
    SCOPED_TRACE(decode);
    const std::vector<int32_t> prompt = Prompt(++seed, 600);
    Mark({{100, 500}});
    reserve_with_tokens_ = std::string(decode) == "snapkv";
    reuse_.set_decode(decode);
    reuse_.set_policy("samkv");
    const Result first = Generate(prompt, Sampling(12));
    ASSERT_TRUE(first.run.ok()) << first.run;
    ASSERT_TRUE(first.stream.ok()) << first.stream;
    EXPECT_EQ(first.receipt.aligned_tokens(), 0u);
    reuse_.set_policy("exact");
    const Result exact = Generate(prompt, Sampling(12));
    ASSERT_TRUE(exact.run.ok()) << exact.run;
    ASSERT_TRUE(exact.stream.ok()) << exact.stream;
    EXPECT_EQ(first.tokens, exact.tokens);
    EXPECT_EQ(first.receipt.decode_selector(), exact.receipt.decode_selector());
    EXPECT_EQ(decode_->pool().num_free(), decode_->pool().num_pages());
  }
}

// Lists take pages, which are reserved with the rest, and come back with it.
TEST_P(SamKvWorkersTest, ListsAreReserved) {
  const auto pages_of = [&](const char* policy, const char* decode) {
    reuse_.set_policy(policy);
    reuse_.set_decode(decode);
    const auto ticket = Reserve(Prompt(3, 3000), Sampling(2));
    EXPECT_TRUE(ticket.ok()) << ticket.status();
    const int64_t taken = decode_->pool().num_pages() - decode_->pool().num_free();
    v1::ReleaseRequest release;
    release.set_ticket_id(ticket->ticket_id());
    release.set_generation(ticket->generation());
    release.set_writer_quiet(true);
    v1::ReleaseResponse response;
    grpc::ClientContext context;
    EXPECT_TRUE(decode_stub_->Release(&context, release, &response).ok());
    EXPECT_TRUE(PagesComeBack());
    return taken;
  };
  const int64_t streams = engine::KvShapeOf(model_->config()).num_streams();
  // 3,000 positions are one page of each stream, whatever chooses beside them.
  EXPECT_EQ(pages_of("samkv", "auto") - pages_of("exact", "auto"), streams);
  EXPECT_EQ(pages_of("samkv", "sparcas") - pages_of("exact", "sparcas"), streams);
  EXPECT_EQ(pages_of("samkv", "quest") - pages_of("exact", "quest"), streams);
}

TEST_P(SamKvWorkersTest, WhatIsNotServedSaysWhich) {
  const Documents documents = MakeDocuments();
  reuse_.set_policy("samkv");
  Mark(documents.ranges);
  reuse_.set_decode("head_classes");
  const absl::Status selector = Generate(documents.prompt, Sampling(2)).run;
  EXPECT_EQ(selector.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(selector.message(), testing::HasSubstr("'head_classes' needs"));
  reuse_.clear_decode();
  reuse_.mutable_samkv()->set_budget_ratio(2);
  // Nothing is reserved for what a prefill worker would refuse.
  const absl::Status budget = Reserve(documents.prompt, Sampling(2)).status();
  EXPECT_EQ(budget.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(budget.message(), testing::HasSubstr("budget_ratio is 2"));
  reuse_.mutable_samkv()->clear_budget_ratio();
  reuse_.mutable_samkv()->set_recompute("sparsex");
  const absl::Status recompute = Reserve(documents.prompt, Sampling(2)).status();
  EXPECT_THAT(recompute.message(), testing::HasSubstr("recompute is 'sparsex'"));
}

const std::vector<Way> kWays = {{"device", true, "device"},
                                {"shm", false, "shm", 2, 1},
                                {"shm", false, "shm"},
                                {"tcp", false, "tcp"},
                                {"shm", false, "shm", 1, 2}};
INSTANTIATE_TEST_SUITE_P(Ways, SamKvWorkersTest, testing::ValuesIn(FewOf(1, kWays)), WayName);
INSTANTIATE_TEST_SUITE_P(Ways, SamKvTokensTest, testing::ValuesIn(FewOf(1, kWays)), WayName);
INSTANTIATE_TEST_SUITE_P(OnePool, SamKvTokensTest, testing::Values(Way{"in place", false, "in place"}), WayName);

}  // namespace
}  // namespace spl
