// Copies by what their KV has seen: which of the three contexts a copy has, and what follows from it.
#include "services/engine/cache/copy_context.h"

#include <algorithm>
#include <cmath>

#include "kernels/common/tolerance.h"
#include "tests/services/engine/segments_fixture.h"

namespace spl::engine {
namespace {

using enum CopyContext;

constexpr chunk::Digest kNamespace{7};

Tokens Joined(std::initializer_list<Tokens> parts) {
  Tokens tokens;
  for (const Tokens& part : parts) tokens.insert(tokens.end(), part.begin(), part.end());
  return tokens;
}

class CopyContextTest : public SegmentsFixture {
 protected:
  std::vector<CopyContext> Contexts(const Tokens& prompt, const std::vector<SegmentHit>& hits) const {
    std::vector<CopyContext> contexts;
    for (const SegmentHit& hit : hits) contexts.push_back(ContextOf(hit, prompt, hits.front().target));
    return contexts;
  }
};
using Are = std::vector<CopyContext>;

TEST_P(CopyContextTest, IsTheSameWhereTheTextThatWasSeenStandsInFront) {
  if (IsSkipped()) return;
  std::mt19937 random = SeededRandom("contexts");
  const Tokens lead = RandomTokens(random, 30), a = RandomTokens(random, 100), b = RandomTokens(random, 150),
               other = RandomTokens(random, 100), question = RandomTokens(random, 40);
  const Tokens context = Joined({lead, a, b});
  const Result exact = Exact(context);
  const auto first = SourceOf(exact, context, 30, 130, 30), second = SourceOf(exact, context, 130, 280, 30);
  EXPECT_EQ(Contexts(Joined({lead, a, b, question}), {{first, 0, 30, 100}, {second, 0, 130, 150}}),
            (Are{kSame, kSame}));
  const Tokens new_lead = RandomTokens(random, 20);
  EXPECT_EQ(Contexts(Joined({new_lead, a, b, question}), {{first, 0, 20, 100}, {second, 0, 120, 150}}),
            (Are{kSame, kSame}))
      << "other instructions of a few tokens";
  EXPECT_EQ(Contexts(Joined({new_lead, b, a, question}), {{second, 0, 20, 150}, {first, 0, 170, 100}}),
            (Are{kForeign, kIsolated}))
      << "the second has seen the first, which is not in front of it here; the first began its prompt";
  EXPECT_EQ(Contexts(Joined({lead, a, RandomTokens(random, 1), b}), {{first, 0, 30, 100}, {second, 0, 131, 150}}),
            (Are{kSame, kForeign}))
      << "a token between them";
  // One token more than may differ. It differs from what sources have seen there, which a random one may not.
  Tokens many = RandomTokens(random, 65);
  while (many.back() == lead.back() || many.back() == a.back()) many.back() = (many.back() + 1) % 512;
  for (const int32_t more : {64, 65}) {
    EXPECT_EQ(Contexts(Joined({Tokens(many.begin(), many.begin() + more), a, question}), {{first, 0, more, 100}}),
              Are{more == 64 ? kSame : kIsolated})
        << "behind " << more << " tokens that it has not seen";
  }
  EXPECT_EQ(Contexts(Joined({lead, other, b}), {{second, 0, 130, 150}}), Are{kForeign}) << "without its beginning";
  const Tokens rest(a.begin() + 70, a.end());
  EXPECT_EQ(Contexts(Joined({lead, rest, b}), {{first, 70, 30, 30}, {second, 0, 60, 150}}), (Are{kForeign, kForeign}))
      << "without the beginning of its own segment";

  // Computed behind another document of the same length: at the positions that it has here.
  const Tokens foreign = Joined({lead, other, b});
  const auto stranger = SourceOf(Exact(foreign), foreign, 130, 280, 30);
  EXPECT_EQ(Contexts(Joined({lead, a, b, question}), {{first, 0, 30, 100}, {stranger, 0, 130, 150}}),
            (Are{kSame, kForeign}))
      << "it has never seen the first";

  // Computed behind the instructions alone: it has seen nothing that is not here, and not the first.
  const Tokens short_one = Joined({lead, b});
  const auto behind_lead = SourceOf(Exact(short_one), short_one, 30, 180, 30);
  EXPECT_EQ(Contexts(Joined({lead, a, b, question}), {{first, 0, 30, 100}, {behind_lead, 0, 130, 150}}),
            (Are{kSame, kIsolated}));
  const Tokens long_one = Joined({many, b});
  const auto behind_more = SourceOf(Exact(long_one), long_one, 65, 215, 65);
  EXPECT_EQ(Contexts(Joined({lead, a, b, question}), {{first, 0, 30, 100}, {behind_more, 0, 130, 150}}),
            (Are{kSame, kForeign}))
      << "too many instructions";
  const auto second_short = SourceOf(Exact(short_one), short_one, 30, 180, 0);
  EXPECT_EQ(Contexts(Joined({lead, a, b, question}), {{first, 0, 30, 100}, {second_short, 0, 130, 150}}),
            (Are{kSame, kForeign}))
      << "it stood behind another segment, if a short one";

  // By itself; and, at the start of a prompt, in the context that it has there.
  const auto alone = SourceOf(Exact(b), b, 0, 150);
  EXPECT_EQ(Contexts(Joined({lead, a, b}), {{first, 0, 30, 100}, {alone, 0, 130, 150}}), (Are{kSame, kIsolated}));
  EXPECT_EQ(Contexts(Joined({lead, b}), {{alone, 0, 30, 150}}), Are{kIsolated});
  EXPECT_EQ(Contexts(Joined({b, question}), {{alone, 0, 0, 150}}), Are{kSame});
  const Tokens tail_of_b(b.begin() + 64, b.end());
  EXPECT_EQ(Contexts(b, {{alone, 64, 64, 86}}), Are{kSame}) << "its start was a prefix hit";
  EXPECT_EQ(Contexts(Joined({lead, b}), {{alone, 64, 94, 86}}), Are{kIsolated});
  EXPECT_EQ(Contexts(Joined({Tokens(200, 3), tail_of_b}), {{alone, 64, 200, 86}}), Are{kForeign})
      << "it has seen its own start, which is not here";

  // Unmarked text: the source is the whole prompt, and the copy begins inside of it.
  const auto whole = SourceOf(exact, context, 0, 280);
  EXPECT_EQ(Contexts(Joined({new_lead, a, b, question}), {{whole, 30, 20, 250}}), Are{kSame});
  EXPECT_EQ(Contexts(Joined({many, a, b}), {{whole, 30, 65, 250}}), Are{kForeign});
  EXPECT_EQ(Contexts(Joined({new_lead, b}), {{whole, 130, 20, 150}}), Are{kForeign}) << "it has seen the first";

  // Chunks of an older build: nobody knows behind what.
  const auto unknown =
      std::make_shared<SegmentSource>(*exact.kv, 130, std::span(context).subspan(130, 150), SourceContext{});
  EXPECT_EQ(Contexts(Joined({lead, a, b, question}), {{first, 0, 30, 100}, {unknown, 0, 130, 150}}),
            (Are{kSame, kForeign}));
}

// Instructions that are longer than what may differ: all but their first 64 tokens count.
TEST_P(CopyContextTest, LongInstructionsCountButForTheirStart) {
  if (IsSkipped()) return;
  std::mt19937 random = SeededRandom("long instructions");
  const Tokens lead = RandomTokens(random, 300), a = RandomTokens(random, 100), b = RandomTokens(random, 60);
  const Tokens context = Joined({lead, a, b});
  const Result exact = Exact(context);
  const auto second = SourceOf(exact, context, 400, 460, 300);
  const auto with_change_at = [&](size_t i) {
    Tokens prompt = context;
    prompt[i] ^= 1;
    return Contexts(prompt, {{second, 0, 400, 60}});
  };
  EXPECT_EQ(with_change_at(0), Are{kSame});
  EXPECT_EQ(with_change_at(63), Are{kSame});
  EXPECT_EQ(with_change_at(64), Are{kForeign});
  EXPECT_EQ(with_change_at(399), Are{kForeign});
}

TEST(SourceContextTest, IsSaltedAndSurvivesAHeader) {
  std::mt19937 random = SeededRandom("salt");
  const Tokens prompt = RandomTokens(random, 300);
  const SourceContext context = SourceContextOf(kNamespace, prompt, 200, 50);
  EXPECT_FALSE(context.isolated);
  EXPECT_TRUE(context.front.known());
  EXPECT_EQ(context.front.lead, 50u);
  EXPECT_EQ(SourceContextOf(kNamespace, prompt, 200, 90).front.lead, 64u);
  EXPECT_NE(SourceContextOf({8}, prompt, 200, 50).front.digest, context.front.digest);
  EXPECT_TRUE(SourceContextOf(kNamespace, prompt, 0, 50).isolated);
  chunk::ChunkHeader header{.num_tokens = 64, .provenance = chunk::Provenance::kExact, .payload_bytes = 1};
  header.namespace_id = kNamespace;
  header.context = context.front;
  const SourceContext read = ContextOfHeader(header);
  EXPECT_EQ(read.front, context.front);
  EXPECT_EQ(read.namespace_key, kNamespace);
}

// At its own place a copy in the same context is what would have been computed, and nothing of it is computed again.
TEST_P(CopyContextTest, TheSameContextAtTheSamePlaceIsAPrefixBitForBit) {
  if (IsSkipped()) return;
  std::mt19937 random = SeededRandom("the same place");
  const Tokens before = RandomTokens(random, 500), lead(before.begin(), before.begin() + 40);
  const Result source = Exact(before);
  for (const size_t question : {1, 17, 150}) {
    Tokens prompt = before;
    prompt.resize(460);
    prompt = Joined({prompt, RandomTokens(random, static_cast<int32_t>(question))});
    const std::vector<SegmentHit> hits{{SourceOf(source, before, 40, 200, 40), 0, 40, 160},
                                       {SourceOf(source, before, 200, 460, 40), 0, 200, 260}};
    const Result want = Exact(prompt), got = Run(prompt, {.policy = "sparsex"}, hits);
    EXPECT_TRUE(SameKv(got, want, static_cast<int32_t>(prompt.size())));
    EXPECT_TRUE(SameLogits(got, want));
    EXPECT_EQ(got.recomputed, 0);
    // Asked for, rows are computed.
    EXPECT_GT(Run(prompt, {.policy = "sparsex", .recompute_share = 0.05}, hits).recomputed, 0);
  }
}

// Copies in the same context beside isolated ones that are so small that all of their tokens are recomputed: together
// the exact prefill, bit for bit. The former have no rows in any layer.
TEST_P(CopyContextTest, CopiesInTheSameContextAreReadByTheRowsOfOthers) {
  std::mt19937 random = SeededRandom("mixed contexts");
  Load("", std::nullopt, 192, 8);  // three dense layers
  const int rounds = GetParam() == "cpu" ? 60 : 20;
  for (int round = 0; round < rounds && !HasFailure(); ++round) {
    if (IsSkipped()) return;
    Tokens prompt = RandomTokens(random, Between(random, 0, 60));
    struct Part {
      PositionRange range;
      bool same;
    };
    std::vector<Part> parts;
    int others = 0;  // three of at most 80 tokens are recomputed as a whole
    for (int i = Between(random, 2, 5); i > 0; --i) {
      const auto begin = static_cast<int32_t>(prompt.size());
      prompt = Joined({prompt, RandomTokens(random, Between(random, 40, 80))});
      parts.push_back({{begin, static_cast<int32_t>(prompt.size())}, others == 3 || random() % 2 == 0});
      others += parts.back().same ? 0 : 1;
      if (random() % 3 == 0) prompt = Joined({prompt, RandomTokens(random, Between(random, 1, 20))});
    }
    if (random() % 3 != 0) prompt = Joined({prompt, RandomTokens(random, Between(random, 1, 90))});
    const Result want = Exact(prompt);
    std::vector<SegmentHit> hits;
    std::vector<Result> alone;  // keeps the pages
    int64_t same = 0;
    for (const Part& part : parts) {
      const auto [begin, end] = part.range;
      if (part.same) {
        hits.push_back({SourceOf(want, prompt, begin, end, parts.front().range.begin), 0, begin, end - begin});
        same += end - begin;
        continue;
      }
      const Tokens text(prompt.begin() + begin, prompt.begin() + end);
      alone.push_back(Exact(text));
      hits.push_back({SourceOf(alone.back(), text, 0, end - begin), 0, begin, end - begin});
    }
    const Result got = Run(prompt, {.policy = "sparsex"}, hits);
    EXPECT_TRUE(SameKv(got, want, static_cast<int32_t>(prompt.size()))) << "round " << round;
    EXPECT_TRUE(SameLogits(got, want)) << "round " << round;
    int64_t copied = 0;
    for (const SegmentHit& hit : hits) copied += hit.num_tokens;
    // The tail of a prompt that ends with a copy is always computed where anything is recovered.
    const int64_t tail = hits.back().target + hits.back().num_tokens == static_cast<int32_t>(prompt.size()) ? 64 : 0;
    EXPECT_LE(got.recomputed, copied - same + tail) << "round " << round;
  }
}

// Elsewhere a copy differs from a prefix by the rotation of its keys. In a model whose layers see 16 tokens back the
// other instructions reach 64 tokens into the first copy and no further, so that the answers must be the same.
TEST_P(CopyContextTest, TheSameContextAtAnotherPlaceIsAPrefixToWithinRounding) {
  std::mt19937 random = SeededRandom("another place");
  for (const kernels::DType kv : {kernels::DType::kF32, kernels::DType::kBF16}) {
    Load(R"(,"architectures":["MistralForCausalLM"],"sliding_window":16)", kv);
    if (IsSkipped()) return;
    const Tokens a = RandomTokens(random, 200), b = RandomTokens(random, 260), question = RandomTokens(random, 20);
    const Tokens before = Joined({RandomTokens(random, 50), a, b}),
                 prompt = Joined({RandomTokens(random, 23), a, b, question});
    const Result source = Exact(before), want = Exact(prompt);
    const std::vector<SegmentHit> hits{{SourceOf(source, before, 50, 250, 50), 0, 23, 200},
                                       {SourceOf(source, before, 250, 510, 50), 0, 223, 260}};
    ASSERT_EQ(Contexts(prompt, hits), (Are{kSame, kSame}));
    const Result got = Run(prompt, {.policy = "sparsex"}, hits);
    EXPECT_EQ(got.recomputed, 0);
    double error = 0, norm = 0;
    for (size_t i = 0; i < want.logits.size(); ++i) {
      error += std::pow(double{got.logits[i]} - want.logits[i], 2);
      norm += std::pow(double{want.logits[i]}, 2);
    }
    std::printf("relative error %.2e\n", std::sqrt(error / norm));
    EXPECT_LE(std::sqrt(error / norm), kernels::ToleranceFor(kernels::DType::kBF16).relative_l2);
    EXPECT_GT(error, 0) << "keys were rotated";
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, CopyContextTest, testing::Values("cpu", "ranks", "cuda"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace spl::engine
