// Segment index and frozen pool, against small models of themselves.
#include "services/engine/cache/segment_index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>

#include "tests/services/engine/cache_fixture.h"

namespace spl::engine {
namespace {

class SegmentIndexTest : public CacheTest {
 protected:
  using Tokens = std::vector<int32_t>;
  static constexpr chunk::Digest kSpace{7};

  static Tokens Text(int32_t number, size_t length) {
    Tokens text(length);
    for (size_t i = 0; i < length; ++i) text[i] = number * 1000 + static_cast<int32_t>(i);
    return text;
  }
  static PositionRange All(const Tokens& text) { return {0, static_cast<int32_t>(text.size())}; }
  // In pages of its own; null when there are none.
  std::shared_ptr<const SegmentSource> Source(const Tokens& text) {
    SequenceKv kv(pool_, kShape);
    if (!kv.Reserve(static_cast<int64_t>(text.size())).ok()) return nullptr;
    kv.set_num_tokens(static_cast<int64_t>(text.size()));
    return std::make_shared<SegmentSource>(kv, 0, text, SourceContext{.isolated = true});
  }
  bool Has(const Tokens& text) { return index_.Contains(index_.KeysOf(kSpace, text)); }

  SegmentIndex index_{chunk::Digest{1}};
};

TEST_F(SegmentIndexTest, OrdinarySourcesGoByRecencyFrozenOnesByUse) {
  std::vector<Tokens> texts;
  for (int32_t i = 0; i < 6; ++i) texts.push_back(Text(i, 100));
  for (int32_t i = 0; i < 6; ++i) EXPECT_TRUE(index_.Insert(kSpace, Source(texts[i]), i >= 3));
  EXPECT_EQ(index_.stats().num_frozen, 3u);
  EXPECT_EQ(index_.stats().frozen_tokens, 300);
  EXPECT_EQ(index_.frozen_pages(), 3 * 12);
  for (const int32_t i : {3, 5, 3, 0, 5, 4}) EXPECT_EQ(index_.FindSegment(kSpace, texts[i], All(texts[i])).size(), 1u);
  EXPECT_TRUE(index_.EvictOne());
  EXPECT_FALSE(Has(texts[1]));
  EXPECT_TRUE(index_.EvictOne());
  EXPECT_FALSE(Has(texts[2]));
  EXPECT_TRUE(index_.EvictOne());
  EXPECT_FALSE(index_.EvictOne()) << "frozen ones are not for it";
  EXPECT_TRUE(index_.EvictFrozen());
  EXPECT_FALSE(Has(texts[4]));
  EXPECT_TRUE(index_.EvictFrozen());
  EXPECT_FALSE(Has(texts[3])) << "used as often as the other, and longer ago";
  // A new one counts as if it had been used a little more than the last one dropped: it is not always the victim.
  EXPECT_TRUE(index_.Insert(kSpace, Source(texts[1]), true));
  EXPECT_EQ(index_.FindSegment(kSpace, texts[1], All(texts[1])).size(), 1u);
  EXPECT_TRUE(index_.EvictFrozen());
  EXPECT_FALSE(Has(texts[5]));
  EXPECT_EQ(index_.stats().num_frozen_dropped, 3u);
  index_.CheckInvariants();
}

TEST_F(SegmentIndexTest, WhatIsFoundOrOfferedAgainBecomesFrozen) {
  const Tokens found = Text(1, 130), offered = Text(2, 70), plain = Text(3, 64);
  for (const Tokens& text : {found, offered, plain}) EXPECT_TRUE(index_.Insert(kSpace, Source(text)));
  EXPECT_EQ(index_.FindSegment(kSpace, found, All(found), true).size(), 1u);
  EXPECT_FALSE(index_.Insert(kSpace, Source(offered), true));
  EXPECT_EQ(index_.stats().num_frozen, 2u);
  EXPECT_TRUE(index_.EvictOne());
  EXPECT_FALSE(Has(plain));
  EXPECT_TRUE(Has(found) && Has(offered));
  index_.CheckInvariants();
}

// A source that has seen other text, and the one that takes its place: frozen as it was, and nothing is kept twice.
TEST_F(SegmentIndexTest, AReplacementIsFrozenIfTheReplacedWas) {
  for (const bool frozen : {false, true}) {
    const Tokens text = Text(frozen ? 1 : 2, 200);
    const auto keys = index_.KeysOf(kSpace, text);
    SequenceKv kv(pool_, kShape);
    ASSERT_TRUE(kv.Reserve(210).ok());
    kv.set_num_tokens(210);
    EXPECT_FALSE(index_.ContainsFirst(keys)) << "nothing is here";
    EXPECT_TRUE(index_.Insert(kSpace, std::make_shared<SegmentSource>(kv, 10, text, SourceContext{}), frozen));
    EXPECT_TRUE(index_.Contains(keys));
    EXPECT_FALSE(index_.ContainsFirst(keys)) << "nobody knows what it has seen";
    EXPECT_FALSE(index_.Insert(kSpace, Source(text))) << "what is here stays";
    EXPECT_FALSE(index_.ContainsFirst(keys));
    index_.Replace(kSpace, Source(text));
    EXPECT_TRUE(index_.ContainsFirst(keys));
    EXPECT_EQ(index_.stats().num_sources, 1u);
    EXPECT_EQ(index_.stats().num_frozen, frozen ? 1u : 0u);
    const auto hits = index_.FindSegment(kSpace, text, All(text));
    ASSERT_EQ(hits.size(), 1u);
    EXPECT_TRUE(hits[0].source->isolated());
    index_.CheckInvariants();
    EXPECT_TRUE(frozen ? index_.EvictFrozen() : index_.EvictOne());
  }
}

// With nothing in front, or the instructions of a prompt; not behind another segment, or what nobody knows.
TEST_F(SegmentIndexTest, SourcesThatBeganTheirPrompts) {
  SequenceKv kv(pool_, kShape);
  ASSERT_TRUE(kv.Reserve(320).ok());
  kv.set_num_tokens(320);
  const Tokens prompt = Text(3, 320);
  const auto began = [&](int32_t begin, const SourceContext& context) {
    return SegmentSource(kv, begin, std::span(prompt).subspan(begin, 64), context).began_prompt();
  };
  EXPECT_TRUE(began(0, SourceContextOf(kSpace, prompt, 0, 0)));
  EXPECT_TRUE(began(20, SourceContextOf(kSpace, prompt, 20, 20)));
  EXPECT_TRUE(began(kLeadTokensMax, SourceContextOf(kSpace, prompt, kLeadTokensMax, kLeadTokensMax)));
  EXPECT_FALSE(began(kLeadTokensMax + 1, SourceContextOf(kSpace, prompt, kLeadTokensMax + 1, kLeadTokensMax + 1)));
  EXPECT_FALSE(began(100, SourceContextOf(kSpace, prompt, 100, 20))) << "behind a segment";
  EXPECT_FALSE(began(20, SourceContextOf(kSpace, prompt, 20, 0))) << "behind a segment without instructions";
  EXPECT_FALSE(began(20, SourceContext{}));
}

// A frozen document that begins like another text stays findable when that one goes; the other way round the longer
// text takes over, and nothing is kept twice.
TEST_F(SegmentIndexTest, AFrozenSourceAnswersForAllOfItsTokens) {
  const Tokens document = Text(1, 256);
  const Tokens begin(document.begin(), document.begin() + 128);
  EXPECT_TRUE(index_.Insert(kSpace, Source(begin)));
  EXPECT_TRUE(index_.Insert(kSpace, Source(document), true));
  EXPECT_EQ(index_.stats().num_sources, 1u);
  EXPECT_FALSE(index_.EvictOne());
  EXPECT_EQ(index_.FindSegment(kSpace, document, All(document)).size(), 1u);
  Tokens longer = document;
  longer.insert(longer.end(), 100, 5);
  EXPECT_TRUE(index_.Insert(kSpace, Source(longer)));
  const auto hits = index_.FindSegment(kSpace, longer, All(longer));
  ASSERT_EQ(hits.size(), 2u) << "the document from the frozen source, the rest from the other";
  EXPECT_EQ(hits[0].num_tokens, 256);
  EXPECT_TRUE(index_.EvictOne());
  EXPECT_TRUE(Has(document));
  EXPECT_EQ(index_.stats().num_sources, 1u);
  index_.CheckInvariants();
}

// Random texts (some begin alike), inserts, uses and evictions, with a model of who must go next.
TEST_F(SegmentIndexTest, RandomUseKeepsTheInvariantsAndTheOrder) {
  const uint32_t seed = std::random_device{}();
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  std::vector<Tokens> texts;
  for (int32_t i = 0; i < 14; ++i) texts.push_back(Text(i, 1 + random() % 250));
  struct Model {
    bool frozen = false;
    uint64_t rank = 0, used = 0;
  };
  std::map<size_t, Model> model;  // by text
  uint64_t clock = 0, age = 0;
  const auto use = [&](size_t i, bool freeze) {
    Model& entry = model[i];
    if (freeze && !entry.frozen) {
      entry.frozen = true;
      entry.rank = age + 1;
    }
    if (entry.frozen) entry.rank = std::max(entry.rank, age) + 1;
    entry.used = ++clock;
  };
  const auto victim = [&](bool frozen) {
    std::optional<size_t> first;
    for (const auto& [i, entry] : model) {
      if (entry.frozen != frozen) continue;
      const auto order = [](const Model& m) { return std::pair(m.frozen ? m.rank : 0, m.used); };
      if (!first || order(entry) < order(model[*first])) first = i;
    }
    return first;
  };
  for (int step = 0; step < 4000 && !HasFailure(); ++step) {
    const size_t i = random() % texts.size();
    const bool frozen = random() % 4 == 0;
    switch (random() % 4) {
      case 0: {
        const auto source = Source(texts[i]);
        if (source == nullptr) break;
        const bool is_new = !model.contains(i);
        EXPECT_EQ(index_.Insert(kSpace, source, frozen), is_new);
        if (!is_new) {
          use(i, frozen);
        } else {
          model[i] = {frozen, age + 1, ++clock};
        }
        break;
      }
      case 1: {
        const auto hits = index_.FindSegment(kSpace, texts[i], All(texts[i]), frozen);
        ASSERT_EQ(hits.size(), model.contains(i) ? 1u : 0u);
        if (hits.empty()) break;
        EXPECT_EQ(hits[0].num_tokens, static_cast<int32_t>(texts[i].size()));
        use(i, frozen);
        break;
      }
      default: {
        const bool pool = random() % 3 == 0;
        const auto expected = victim(pool);
        EXPECT_EQ(pool ? index_.EvictFrozen() : index_.EvictOne(), expected.has_value());
        if (!expected) break;
        EXPECT_FALSE(Has(texts[*expected])) << "step " << step << ", frozen " << pool;
        if (pool) age = model[*expected].rank;
        model.erase(*expected);
      }
    }
    int64_t pages = 0, frozen_pages = 0;
    for (const auto& [j, entry] : model) {
      EXPECT_TRUE(Has(texts[j])) << "step " << step;
      const int64_t held = int64_t{PagesFor(static_cast<int64_t>(texts[j].size()))} * kShape.num_streams();
      pages += held;
      frozen_pages += entry.frozen ? held : 0;
    }
    EXPECT_EQ(pool_.num_free(), kPages - pages);
    EXPECT_EQ(index_.frozen_pages(), frozen_pages);
    EXPECT_EQ(index_.stats().num_sources, model.size());
    if (step % 20 == 0) index_.CheckInvariants();
  }
  pool_.CheckInvariants();
}

// The same with texts that share their beginnings: who answers for what is not modelled, only that it is right.
TEST_F(SegmentIndexTest, TextsThatBeginAlikeNeverAnswerWrongly) {
  const uint32_t seed = std::random_device{}();
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  std::vector<Tokens> texts;
  for (int32_t i = 0; i < 10; ++i) {
    Tokens text = i < 3 ? Text(i, 200) : texts[random() % texts.size()];
    text.resize(1 + random() % text.size());
    const Tokens tail = Text(100 + i, random() % 150);
    text.insert(text.end(), tail.begin(), tail.end());
    texts.push_back(text);
  }
  for (int step = 0; step < 4000 && !HasFailure(); ++step) {
    const Tokens& text = texts[random() % texts.size()];
    const bool frozen = random() % 4 == 0;
    const auto before = index_.stats();
    switch (random() % 4) {
      case 0:
        if (const auto source = Source(text)) {
          index_.Insert(kSpace, source, frozen);
          EXPECT_TRUE(Has(text));
        }
        break;
      case 1: {
        int32_t covered = 0;
        for (const SegmentHit& hit : index_.FindSegment(kSpace, text, All(text), frozen)) {
          EXPECT_EQ(hit.target, covered) << "without a gap";
          covered += hit.num_tokens;
          const auto there = hit.source->tokens().subspan(static_cast<size_t>(hit.offset), hit.num_tokens);
          EXPECT_TRUE(std::equal(there.begin(), there.end(), text.begin() + hit.target));
        }
        EXPECT_EQ(covered == static_cast<int32_t>(text.size()), Has(text));
        break;
      }
      case 2:
        if (index_.EvictOne()) {
          EXPECT_EQ(index_.stats().num_sources + 1, before.num_sources);
        }
        EXPECT_EQ(index_.stats().num_frozen, before.num_frozen) << "frozen sources are spared";
        break;
      default:
        EXPECT_EQ(index_.EvictFrozen(), before.num_frozen > 0);
        EXPECT_EQ(index_.stats().num_frozen + (before.num_frozen > 0 ? 1 : 0), before.num_frozen);
    }
    index_.CheckInvariants();
  }
  while (index_.EvictOne() || index_.EvictFrozen()) {
  }
  EXPECT_EQ(pool_.num_free(), kPages) << "every page came back";
}

}  // namespace
}  // namespace spl::engine
