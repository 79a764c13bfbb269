// samkv over quantized copies of documents: what is fetched, to the byte, what comes of it, and who makes them.
#include <future>

#include "services/engine/cache/chunk_io.h"
#include "services/engine/cache/quantized_kv.h"
#include "services/engine/cache/segment_io.h"
#include "services/engine/recovery/sparsex.h"
#include "tests/services/engine/stored_documents_fixture.h"
#include "tests/support/background_idle.h"

namespace spl::engine {
namespace {

class QuantizedCopiesTest : public StoredDocumentsTest {
 protected:
  // By the engine that is there.
  PrefillStats AskSamKv(bool publish) {
    return Ask(
               prompt_,
               [&](PrefillRequest& r) {
                 r.segments = segments_;
                 r.reuse = {.policy = "samkv", .budget_ratio = 0.45};
                 r.publish = publish;
               },
               1)
        ->stats;
  }
  // Of one chunk.
  static int64_t WholeBytes() { return static_cast<int64_t>(ChunkPayloadBytes(*model_)); }
  static int64_t CopyBytes(bool isolated) {
    return static_cast<int64_t>(
        QuantizedChunkBytes(model_->config(), SparseXPolicy::DefaultDenseLayers(model_->config(), isolated)));
  }
  // The pages of these layers, [layer][KV head], to four bits and back.
  static void RoundLayersFrom(int32_t first_layer, std::vector<std::byte>& payload) {
    const ModelConfig& c = model_->config();
    const size_t page = model_->page_bytes();
    std::vector<std::byte> quantized(QuantizedPageBytes(c.head_dim));
    for (size_t at = static_cast<size_t>(first_layer * c.num_kv_heads) * page; at < payload.size(); at += page) {
      QuantizePage({payload.data() + at, page}, model_->kv_dtype(), c.head_dim, quantized.data());
      DequantizePage(quantized, model_->kv_dtype(), c.head_dim, payload.data() + at);
    }
  }
};

// choose=recovered, of published documents: four bits a value of the layers above the boundary, and no KV.
TEST_F(QuantizedCopiesTest, RecoveryReadsQuantizedCopies) {
  Start(8192, 8192, options_);
  PublishAll();
  const auto ask = [&](bool quantized, const std::function<void(PrefillRequest&)>& change = nullptr) {
    return Ask(
        prompt_,
        [&](PrefillRequest& r) {
          r.segments = segments_;
          // Dense layers choose the rows of quantized copies, and here those of whole ones, too.
          r.reuse = {.policy = "samkv", .probe_layers = 0, .budget_ratio = 0.45, .quantized_copies = quantized};
          r.return_first_logits = true;
          r.publish = false;
          if (change) change(r);
        },
        1);
  };
  const int32_t boundary = SparseXPolicy::DefaultDenseLayers(model_->config(), true);
  const int64_t bytes = CopyBytes(true);
  const double of_bf16 = model_->kv_dtype() == kernels::DType::kE4M3 ? 2 : 1;  // as large as this page
  EXPECT_LT(static_cast<double>(bytes), 0.3 * of_bf16 * static_cast<double>(WholeBytes()));
  Start(8192, 8192, options_);  // and knows nothing
  const auto quantized = ask(true);
  EXPECT_EQ(quantized->stats.fetched_bytes, (10 + 11 + 9) * bytes);
  EXPECT_EQ(quantized->stats.aligned_tokens, 640 + 700 + 517);
  EXPECT_LT(quantized->stats.kept_share, 0.6);
  EXPECT_EQ(ask(true)->first_logits, quantized->first_logits);
  // Which nobody else takes for KV, nor who reads more layers, or wants no approximation.
  const auto whole = [&](const std::function<void(PrefillRequest&)>& change, bool allowed = true) {
    Start(8192, 8192, options_);
    const auto outcome = ask(allowed, change);
    EXPECT_EQ(outcome->stats.fetched_bytes, (10 + 11 + 9) * WholeBytes());
    return outcome;
  };
  (void)whole([](PrefillRequest& r) { r.reuse.policy = "sparsex"; });
  (void)whole([](PrefillRequest& r) { r.reuse.choose = "attention"; });
  (void)whole([&](PrefillRequest& r) { r.reuse.dense_layers = boundary - 1; });
  (void)whole([&](PrefillRequest& r) { r.reuse.probe_layers = 1; });
  Start(8192, 8192, options_);
  const auto by_default = ask(true, [](PrefillRequest& r) { r.reuse.probe_layers = -1; });
  EXPECT_EQ(by_default->stats.fetched_bytes, (10 + 11 + 9) * bytes);
  EXPECT_EQ(by_default->stats.probe_layers, 0) << "the copies lack the layers in which a probe begins";
  EXPECT_EQ(by_default->first_logits, quantized->first_logits);
  const auto exact = whole(nullptr, false);
  EXPECT_EQ(ask(true)->first_logits, exact->first_logits) << "KV that is here is read";
  EXPECT_EQ(quantized->stats.kept_share, exact->stats.kept_share);
  EXPECT_NE(quantized->first_logits, exact->first_logits);
  // What was read is what quantizing the KV leaves of it, to the bit.
  for (const auto& text : texts_) {
    for (const auto& key : SegmentIndex(model_->kv_fingerprint()).KeysOf(kDocs, text)) {
      chunk::Chunk chunk = *store_->Find(key);
      RoundLayersFrom(boundary, chunk.payload);
      store_->Remove(key);
      ASSERT_TRUE(store_->Put({&chunk, 1}, SteadyTime::max()).ok());
    }
  }
  EXPECT_EQ(whole(nullptr, false)->first_logits, quantized->first_logits);
  prefill_->WaitIdle(std::chrono::steady_clock::now() + 10s);
}

TEST_F(QuantizedCopiesTest, ATextThatStandsTwiceIsFetchedOnce) {
  Start(8192, 8192, options_);
  PublishAll();
  auto prompt = prompt_;
  auto segments = segments_;
  const auto begin = static_cast<int32_t>(prompt.size());
  prompt.insert(prompt.end(), texts_[1].begin(), texts_[1].end());
  prompt.push_back(7);
  segments.push_back({{begin, begin + 700}, kDocs});
  for (const auto& [policy, bytes] : {std::pair{"samkv", CopyBytes(true)}, std::pair{"sparsex", WholeBytes()}}) {
    Start(8192, 8192, options_);
    const auto fetched = Ask(
        prompt,
        [&](PrefillRequest& r) {
          r.segments = segments;
          r.reuse = {.policy = policy, .budget_ratio = 0.45};
          r.publish = false;
        },
        1);
    EXPECT_EQ(fetched->stats.fetched_bytes, (10 + 11 + 9) * bytes) << policy;
    EXPECT_EQ(fetched->stats.aligned_tokens, 640 + 700 + 517 + 700) << policy;
  }
}

// Documents that were published behind others, as those of a knowledge base, have copies of more layers; the first of a
// context was computed by itself.
TEST_F(QuantizedCopiesTest, QuantizedCopiesOfAContextHaveMoreLayers) {
  Start(8192, 8192, options_);
  PublishRequest request;
  for (const auto& text : texts_) {
    const auto begin = static_cast<int32_t>(request.tokens.size());
    request.tokens.insert(request.tokens.end(), text.begin(), text.end());
    request.segments.push_back({{begin, begin + static_cast<int32_t>(text.size())}, kDocs});
  }
  std::promise<absl::Status> done;
  request.on_done = [&](const absl::Status& status, const PublishOutcome&) { done.set_value(status); };
  ASSERT_TRUE(prefill_->Publish(std::move(request)).ok());
  ASSERT_TRUE(done.get_future().get().ok());
  Start(8192, 8192, options_);
  const PrefillStats fetched = AskSamKv(true);
  EXPECT_EQ(fetched.fetched_bytes, 10 * CopyBytes(true) + (11 + 9) * CopyBytes(false));
  EXPECT_EQ(fetched.aligned_tokens, 640 + 700 + 517);
}

// Without one of its copies, or with a wrong one, a document is fetched as it is; published without, all are.
TEST_F(QuantizedCopiesTest, MissingAndDamagedQuantizedCopiesAreNotUsed) {
  Start(8192, 8192, options_);
  PublishAll();
  const int32_t boundary = SparseXPolicy::DefaultDenseLayers(model_->config(), true);
  const int64_t quantized = CopyBytes(true), whole = WholeBytes();
  const std::vector<chunk::ChunkKey> keys = SegmentIndex(model_->kv_fingerprint()).KeysOf(kDocs, texts_[1]);
  const chunk::ChunkKey key = QuantizedKeyOf(keys[5], model_->kv_fingerprint(), kDocs, boundary);
  const chunk::Chunk good = *store_->Find(key);
  EXPECT_EQ(good.header.namespace_id, kDocs);
  EXPECT_EQ(good.header.provenance, chunk::Provenance::kCanon);
  EXPECT_EQ(good.header.first_position, 5u * 64);
  const auto fetched = [&](const std::function<void(chunk::Chunk&)>& change) {
    store_->Remove(key);
    if (change) {
      chunk::Chunk chunk = good;
      change(chunk);
      EXPECT_TRUE(store_->Put({&chunk, 1}, SteadyTime::max()).ok());
    }
    Start(8192, 8192, options_);
    return AskSamKv(false);
  };
  EXPECT_EQ(fetched([](chunk::Chunk&) {}).fetched_bytes, 30 * quantized);
  for (const auto& change : std::vector<std::function<void(chunk::Chunk&)>>{
           nullptr, [](chunk::Chunk& c) { c.payload.pop_back(), --c.header.payload_bytes; },
           [](chunk::Chunk& c) { c.header.model_fingerprint[0] ^= 1; },
           [](chunk::Chunk& c) { c.header.layout_digest[0] ^= 1; },
           [](chunk::Chunk& c) { c.header.first_position += 64; }, [](chunk::Chunk& c) { c.header.num_tokens = 63; },
           [](chunk::Chunk& c) { c.header.provenance = chunk::Provenance::kExact; },
           [](chunk::Chunk& c) { c.header.provenance = chunk::Provenance::kApprox; }}) {
    const PrefillStats stats = fetched(change);
    // Of the document whose copies are not all good the five in front of it came for nothing.
    EXPECT_EQ(stats.fetched_bytes, (10 + 9 + 5) * quantized + 11 * whole);
    EXPECT_EQ(stats.aligned_tokens, 640 + 700 + 517);
  }
  store_ = std::make_shared<FakeStore>();
  options_.store = store_;
  options_.quantize_published = false;
  Start(8192, 8192, options_);
  PublishAll();
  EXPECT_EQ(fetched(nullptr).fetched_bytes, 30 * whole);
}

// What samkv prompts bring gets quantized copies without being published: computed by itself in the background, or
// fetched whole for want of them.
TEST_F(QuantizedCopiesTest, DocumentsOfPromptsGetQuantizedCopies) {
  const auto ask = [&](bool publish) {
    Start(8192, 8192, options_);  // and knows nothing
    return AskSamKv(publish).fetched_bytes;
  };
  const int64_t quantized = CopyBytes(true), whole = WholeBytes();
  Start(8192, 8192, options_);
  (void)Ask(
      texts_[0],
      [&](PrefillRequest& r) {
        r.segments = {{{0, 640}, kDocs}};
      },
      1);
  ASSERT_TRUE(store_->WaitForSize(10 + 10)) << "the segment, and the same text as a prefix";
  EXPECT_EQ(ask(true), 10 * whole) << "the others are nowhere yet";
  ASSERT_TRUE(test::WaitBackgroundIdle(*prefill_));
  // Two more documents and their summaries; and quantized copies of all.
  const size_t all = 10 + 10 + (11 + 1) + (9 + 1) + (10 + 11 + 9);
  ASSERT_TRUE(store_->WaitForSize(all));
  EXPECT_EQ(ask(true), 30 * quantized);
  EXPECT_EQ(store_->size(), all);
  // Stored by another policy's prompts, or by such as keep nothing, or by workers that are not to: no copies.
  store_ = std::make_shared<FakeStore>();
  options_.store = store_;
  Start(8192, 8192, options_);
  ASSERT_NO_FATAL_FAILURE(AskForEach());
  EXPECT_EQ(ask(false), 30 * whole);
  options_.quantize_published = false;
  EXPECT_EQ(ask(true), 30 * whole);
  options_.quantize_published = true;
  EXPECT_EQ(ask(true), 30 * whole);
  ASSERT_TRUE(store_->WaitForSize(30 + 28 + 30));
  EXPECT_EQ(ask(false), 30 * quantized);
}

// The first prompt computes all of its documents, each but the first behind others.
TEST_F(QuantizedCopiesTest, DocumentsComputedInAPromptGetQuantizedCopies) {
  Start(8192, 8192, options_);
  EXPECT_TRUE(AskSamKv(true).exact);
  ASSERT_TRUE(store_->WaitForSize(prompt_.size() / 64 + 30 + 30)) << "the prompt, its segments, and their copies";
  prompt_[0] ^= 1;  // another start
  Start(8192, 8192, options_);
  const PrefillStats stats = AskSamKv(true);
  EXPECT_EQ(stats.fetched_bytes, 10 * CopyBytes(true) + 20 * CopyBytes(false));
  EXPECT_EQ(stats.aligned_tokens, 640 + 700 + 517);
}

}  // namespace
}  // namespace spl::engine
