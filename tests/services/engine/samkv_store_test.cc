// samkv with documents that are in the chunk store: summaries are found without the KV, and of the KV only what is read
// is fetched.
#include "services/engine/cache/chunk_io.h"
#include "services/engine/cache/segment_io.h"
#include "services/engine/cache/summary_io.h"
#include "services/engine/recovery/samkv_choice.h"
#include "tests/services/engine/stored_documents_fixture.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

class SamKvStoreTest : public StoredDocumentsTest {
 protected:
  std::shared_ptr<Outcome> AskSamKv(const std::string& recompute = "samkv", bool publish = false,
                                    const std::string& choose = "means") {
    return Ask(
        prompt_,
        [&](PrefillRequest& r) {
          r.segments = segments_;
          r.reuse = {.policy = "samkv", .budget_ratio = 0.45, .recompute = recompute, .choose = choose};
          r.return_first_logits = true;
          r.publish = publish;
        },
        1);
  }
  static chunk::ChunkKey SummaryKey(std::span<const int32_t> text) {
    return SummaryKeyOf(SegmentIndex(model_->kv_fingerprint()).KeysOf(kDocs, text), model_->kv_fingerprint(), kDocs);
  }
  int64_t SummaryBytes() const {
    int64_t bytes = 0;
    for (const auto& text : texts_) bytes += static_cast<int64_t>(store_->Find(SummaryKey(text))->payload.size());
    return bytes;
  }
};

// Published once, with what choosing takes. Sizes are those of the contract.
TEST_F(SamKvStoreTest, APublishedSegmentHasItsSummaryBesideIt) {
  Start(8192, 8192, options_);
  PublishAll();
  const ModelConfig& c = model_->config();
  for (const auto& text : texts_) {
    const auto chunk = store_->Find(SummaryKey(text));
    ASSERT_TRUE(chunk.has_value());
    const size_t tiles = (text.size() + 63) / 64;
    const size_t attended = (tiles - 3) * 64 / 4;
    EXPECT_EQ(chunk->payload.size(),
              sizeof(float) * static_cast<size_t>(c.num_layers) * static_cast<size_t>(c.head_dim) *
                      (tiles * static_cast<size_t>(c.num_kv_heads) + static_cast<size_t>(c.num_qo_heads)) +
                  sizeof(int32_t) * attended);
    EXPECT_EQ(chunk->header.namespace_id, kDocs) << "it goes when the namespace goes";
    const auto fetched = FetchSummary(*store_, SummaryKey(text), text.size(), *model_, SteadyTime::max());
    ASSERT_TRUE(fetched.has_value());
    EXPECT_TRUE(fetched->context.isolated);
    EXPECT_EQ(fetched->begin, 0);
    // The means are those of the stored keys: what comes from the pages is the same.
    std::unique_ptr<kernels::Buffer> memory;
    PagePool pool(MakeMemory(memory, 2048), &model_->backend());
    const auto source = FetchSegment(*store_, SegmentIndex(model_->kv_fingerprint()).KeysOf(kDocs, text), text, *model_,
                                     pool, SteadyTime::max(), [](int64_t) { return true; })
                            .source;
    ASSERT_NE(source, nullptr);
    const auto means = SummarizeKeys({source, 0, 0, static_cast<int32_t>(text.size())}, c, model_->kv_dtype());
    ASSERT_TRUE(means.ok());
    EXPECT_EQ(fetched->summary.tile_means, means->tile_means);
    EXPECT_EQ(fetched->summary.attended.size(), attended);
    const chunk::Chunk again = PackSummary(*source, fetched->summary, SummaryKey(text), *model_);
    EXPECT_EQ(again.payload, chunk->payload);
    EXPECT_EQ(again.header.payload_crc32c, chunk->header.payload_crc32c);
  }
}

// Summaries of an older build stand under other keys.
TEST_F(SamKvStoreTest, AnotherVersionIsNotFound) {
  const std::vector<chunk::ChunkKey> keys = SegmentIndex(model_->kv_fingerprint()).KeysOf(kDocs, texts_[0]);
  for (const int32_t version : {1, 2, 3}) {
    const chunk::ChunkKey key =
        chunk::MakeChunkKey(chunk::ChainKind::kSummary, model_->kv_fingerprint(), kDocs, &keys.back(), {&version, 1});
    EXPECT_EQ(key == SummaryKey(texts_[0]), version == 2) << version;
  }
}

// Damage that no checksum shows, since the store under this test compares none: what is believed is in order.
TEST_F(SamKvStoreTest, OffsetsThatCannotBeAreDamage) {
  Start(8192, 8192, options_);
  PublishAll();
  const chunk::Chunk good = *store_->Find(SummaryKey(texts_[2]));
  const size_t num_tokens = texts_[2].size(), num_offsets = 6 * 64 / 4;
  const auto fetch = [&](const chunk::Chunk& chunk) {
    store_->Remove(SummaryKey(texts_[2]));
    EXPECT_TRUE(store_->Put({&chunk, 1}, SteadyTime::max()).ok());
    return FetchSummary(*store_, SummaryKey(texts_[2]), num_tokens, *model_, SteadyTime::max());
  };
  const auto with = [&](size_t index, int32_t offset) {
    chunk::Chunk chunk = good;
    std::memcpy(chunk.payload.data() + chunk.payload.size() - (num_offsets - index) * 4, &offset, 4);
    return fetch(chunk).has_value();
  };
  const auto summary = fetch(good);
  ASSERT_TRUE(summary.has_value());
  const std::vector<int32_t>& attended = summary->summary.attended;
  ASSERT_EQ(attended.size(), num_offsets);
  EXPECT_TRUE(with(0, attended[0]));
  EXPECT_FALSE(with(0, 63)) << "in the initial tile";
  EXPECT_FALSE(with(0, -1));
  EXPECT_FALSE(with(1, attended[0])) << "twice";
  EXPECT_FALSE(with(0, attended[1]));
  EXPECT_FALSE(with(1, attended[2])) << "twice";
  EXPECT_FALSE(with(num_offsets - 1, 448)) << "in a local tile";
  EXPECT_FALSE(with(num_offsets - 1, INT32_MAX));
  // Shorter and longer ones.
  for (const size_t bytes : {size_t{0}, size_t{3}, size_t{4}, num_offsets * 4 - 4, num_offsets * 4}) {
    chunk::Chunk chunk = good;
    chunk.payload.resize(good.payload.size() - bytes);
    EXPECT_EQ(fetch(chunk).has_value(), bytes == 0) << bytes;
  }
  chunk::Chunk longer = good;
  longer.payload.resize(good.payload.size() + 4);
  EXPECT_FALSE(fetch(longer).has_value());
  // Any bytes: refused, or offsets of the middle in their order.
  std::mt19937 random = test::SeededRandom("damage");
  for (int round = 0; round < 300 && !HasFailure(); ++round) {
    chunk::Chunk chunk = good;
    const int changes = 1 + static_cast<int>(random() % 3);
    for (int i = 0; i < changes; ++i)
      chunk.payload[chunk.payload.size() - 1 - random() % (num_offsets * 4)] ^=
          std::byte{static_cast<uint8_t>(1 + random() % 255)};
    const auto damaged = fetch(chunk);
    if (!damaged.has_value()) continue;
    int32_t last = 63;
    for (const int32_t offset : damaged->summary.attended) {
      ASSERT_GT(offset, last);
      ASSERT_LT(offset, 448);
      last = offset;
    }
  }
}

TEST_F(SamKvStoreTest, OnlyWhatIsReadIsFetched) {
  Start(8192, 8192, options_);
  PublishAll();
  Start(8192, 8192, options_);  // and knows nothing
  const auto parts = AskSamKv();
  EXPECT_EQ(parts->stats.aligned_tokens, 640 + 700 + 517);
  EXPECT_EQ(parts->stats.summaries_computed, 0);
  EXPECT_LT(parts->stats.kept_share, 0.6);
  // The first tile and the last two of each document.
  EXPECT_EQ(parts->stats.fetched_bytes, SummaryBytes() + 9 * static_cast<int64_t>(ChunkPayloadBytes(*model_)));
  // Nothing is left that another policy could take for KV.
  const auto naive = Ask(
      prompt_,
      [&](PrefillRequest& r) {
        r.segments = segments_;
        r.reuse.policy = "naive";
        r.publish = false;
      },
      1);
  EXPECT_EQ(naive->stats.fetched_bytes, (10 + 11 + 9) * static_cast<int64_t>(ChunkPayloadBytes(*model_)));
  // With all of the KV here, and the same summaries: the same to the bit.
  Start(8192, 8192, options_);
  const auto copies = AskSamKv("none");
  EXPECT_EQ(copies->stats.fetched_bytes,
            SummaryBytes() + (10 + 11 + 9) * static_cast<int64_t>(ChunkPayloadBytes(*model_)));
  EXPECT_EQ(copies->stats.summaries_computed, 0);
  const auto whole = AskSamKv();
  EXPECT_EQ(whole->stats.fetched_bytes, 0);
  EXPECT_EQ(whole->first_logits, parts->first_logits);
  EXPECT_EQ(whole->stats.kept_share, parts->stats.kept_share);
  prefill_->WaitIdle(std::chrono::steady_clock::now() + 10s);
}

// Copies of kept tokens stay, so all of the KV is fetched, and with it what says which are computed afresh.
TEST_F(SamKvStoreTest, AttendedTokensAreFetchedBesideTheKv) {
  Start(8192, 8192, options_);
  PublishAll();
  for (const char* choose : {"means", "attention"}) {
    Start(8192, 8192, options_);  // and knows nothing
    const auto fetched = AskSamKv("attended", false, choose);
    EXPECT_EQ(fetched->stats.summaries_computed, 0);
    EXPECT_EQ(fetched->stats.fetched_bytes,
              SummaryBytes() + (10 + 11 + 9) * static_cast<int64_t>(ChunkPayloadBytes(*model_)));
    const auto again = AskSamKv("attended", false, choose);
    EXPECT_EQ(again->stats.fetched_bytes, 0);
    EXPECT_EQ(again->first_logits, fetched->first_logits);
    const auto all = AskSamKv("samkv", false, choose);
    EXPECT_LT(fetched->stats.recomputed_tokens, all->stats.recomputed_tokens);
    EXPECT_GT(fetched->stats.recomputed_tokens, 0);
    prefill_->WaitIdle(std::chrono::steady_clock::now() + 10s);
  }
}

// Computed once, and there for the next worker.
TEST_F(SamKvStoreTest, WithoutSummariesTheyAreComputedCountedAndStored) {
  Start(8192, 8192, options_);
  ASSERT_NO_FATAL_FAILURE(AskForEach());
  EXPECT_FALSE(store_->Find(SummaryKey(texts_[0])).has_value());
  Start(8192, 8192, options_);
  const size_t before = store_->size();
  const auto first = AskSamKv("samkv", true);
  EXPECT_EQ(first->stats.summaries_computed, 3);
  EXPECT_EQ(first->stats.fetched_bytes, (10 + 11 + 9) * static_cast<int64_t>(ChunkPayloadBytes(*model_)));
  ASSERT_TRUE(store_->WaitForSize(before + 3));
  Start(8192, 8192, options_);
  const auto second = AskSamKv();
  EXPECT_EQ(second->stats.summaries_computed, 0);
  EXPECT_EQ(second->first_logits, first->first_logits);
  EXPECT_EQ(second->stats.fetched_bytes, SummaryBytes() + 9 * static_cast<int64_t>(ChunkPayloadBytes(*model_)));
}

// Also by a choice that asks for no mean keys: what is stored is whole.
TEST_F(SamKvStoreTest, WhatAttendedTokensWereComputedForHasAllPartsInTheStore) {
  Start(8192, 8192, options_);
  ASSERT_NO_FATAL_FAILURE(AskForEach());
  const size_t before = store_->size();
  const auto first = AskSamKv("attended", true, "attention");
  EXPECT_EQ(first->stats.summaries_computed, 3);
  ASSERT_TRUE(store_->WaitForSize(before + 3));
  Start(8192, 8192, options_);
  const auto second = AskSamKv("attended", false, "attention");
  EXPECT_EQ(second->stats.summaries_computed, 0);
  EXPECT_EQ(second->first_logits, first->first_logits);
  Start(8192, 8192, options_);
  EXPECT_EQ(AskSamKv("samkv", false, "means")->stats.summaries_computed, 0);
}

// Wrong summaries, and KV that is not there any more: the request gets its answer another way.
TEST_F(SamKvStoreTest, WhatTheStoreGivesWronglyIsNotUsed) {
  Start(8192, 8192, options_);
  PublishAll();
  const auto with_change = [&](const std::function<void(FakeStore&)>& change) {
    auto store = std::make_shared<FakeStore>();
    for (const auto& text : texts_) {
      std::vector<chunk::ChunkKey> keys = SegmentIndex(model_->kv_fingerprint()).KeysOf(kDocs, text);
      keys.push_back(SummaryKey(text));
      for (const auto& key : keys) {
        const chunk::Chunk chunk = *store_->Find(key);
        EXPECT_TRUE(store->Put({&chunk, 1}, SteadyTime::max()).ok());
      }
    }
    change(*store);
    PrefillEngineOptions options = options_;
    options.store = store;
    Start(8192, 8192, options);
    return AskSamKv();
  };
  const auto good = with_change([](FakeStore&) {});
  EXPECT_EQ(good->stats.summaries_computed, 0);
  const auto replace = [&](const std::function<void(chunk::Chunk&)>& change) {
    return [this, change](FakeStore& store) {
      chunk::Chunk chunk = *store.Find(SummaryKey(texts_[1]));
      store.Remove(SummaryKey(texts_[1]));
      change(chunk);
      ASSERT_TRUE(store.Put({&chunk, 1}, SteadyTime::max()).ok());
    };
  };
  const auto shorter =
      with_change(replace([](chunk::Chunk& chunk) { chunk.payload.resize(chunk.payload.size() - 4); }));
  EXPECT_EQ(shorter->stats.summaries_computed, 1);
  const auto other_model = with_change(replace([](chunk::Chunk& chunk) { chunk.header.model_fingerprint[0] ^= 1; }));
  EXPECT_EQ(other_model->stats.summaries_computed, 1);
  const auto approximate =
      with_change(replace([](chunk::Chunk& chunk) { chunk.header.provenance = chunk::Provenance::kApprox; }));
  EXPECT_EQ(approximate->stats.summaries_computed, 1);
  const auto elsewhere = with_change(replace([](chunk::Chunk& chunk) { chunk.header.first_position = 64; }));
  EXPECT_EQ(elsewhere->stats.summaries_computed, 1) << "KV and summary are of different places";
  // Without the last chunk the document is a shorter copy and fresh text.
  const auto gone = with_change(
      [&](FakeStore& store) { store.Remove(SegmentIndex(model_->kv_fingerprint()).KeysOf(kDocs, texts_[1]).back()); });
  EXPECT_EQ(gone->stats.aligned_tokens, 640 + 640 + 517);
  EXPECT_EQ(gone->stats.summaries_computed, 1);
}

// A limit to the number of documents, before anything is reserved for them.
TEST_F(SamKvStoreTest, TooManyDocumentsAreRefused) {
  Start(8192, 8192, options_);
  for (const int32_t count : {kSamKvMaxDocuments, kSamKvMaxDocuments + 1}) {
    std::mt19937 random(7);
    PrefillRequest request;
    request.tokens = RandomPrompt(random, static_cast<size_t>(count) + 10);
    for (int32_t i = 0; i < count; ++i) request.segments.push_back({{i, i + 1}, kDocs});
    request.reuse = {.policy = "samkv"};
    request.sampling.temperature = 0;
    std::promise<absl::Status> done;
    request.on_done = [&](const absl::Status& status, const PrefillOutcome&) { done.set_value(status); };
    PrefillRequest other = request;
    other.reuse.policy = "sparsex";
    const absl::Status submitted = prefill_->Submit(std::move(request));
    if (count <= kSamKvMaxDocuments) {
      ASSERT_TRUE(submitted.ok()) << submitted;
      EXPECT_TRUE(done.get_future().get().ok());
      continue;
    }
    EXPECT_EQ(submitted.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(submitted.message()), testing::HasSubstr("1025 entries"));
    ASSERT_TRUE(prefill_->Submit(std::move(other)).ok());
    EXPECT_TRUE(done.get_future().get().ok());
  }
}

}  // namespace
}  // namespace spl::engine
