// Chunks on their way from a store into pages, of a pool that the host can write and of one that it cannot.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>
#include <string>

#include "kernels/backend/backend.h"
#include "services/engine/cache/chunk_io.h"
#include "services/engine/cache/segment_index.h"
#include "services/engine/cache/segment_io.h"
#include "services/engine/model/prefill_cost.h"
#include "tests/support/engine_devices.h"
#include "tests/support/fake_device_backend.h"
#include "tests/support/paths.h"

namespace spl::engine {
namespace {

using Tokens = std::vector<int32_t>;

// Places chunks as a fast network would: the last first, twice, and ahead of what it then brings.
class RestlessStore final : public chunk::ChunkStore {
  using Deadline = std::chrono::steady_clock::time_point;

 public:
  absl::StatusOr<size_t> CountLeading(std::span<const chunk::ChunkKey>, Deadline) override { return chunks.size(); }
  absl::StatusOr<size_t> GetLeading(std::span<const chunk::ChunkKey>, Deadline,
                                    const std::function<bool(chunk::Chunk&&)>&) override {
    return absl::UnimplementedError("pieces are asked for");
  }
  absl::Status Put(std::span<const chunk::Chunk>, Deadline) override { return absl::OkStatus(); }
  absl::StatusOr<size_t> FetchLeading(std::span<const chunk::ChunkKey> keys, Deadline, const PlaceFn& place,
                                      const FetchedFn& sink) override {
    const size_t count = std::min(keys.size(), chunks.size());
    std::vector<chunk::Pieces> pieces(count);
    for (int round = 0; round < 2; ++round) {
      for (size_t i = count; i-- > 0;) pieces[i] = place(i, chunks[i].header);
    }
    for (size_t i = 0; i < count; ++i) {
      placed.push_back(pieces[i]);
      if (pieces[i].empty()) return i;
      std::vector<std::byte> bytes = chunks[i].payload;
      if (i == damaged) bytes.assign(bytes.size(), std::byte{0xee});
      chunk::CopyToPieces(bytes, pieces[i]);
      if (i == damaged || !sink(i, chunks[i].header)) return i;
    }
    return count;
  }

  std::vector<chunk::Chunk> chunks;
  size_t damaged = SIZE_MAX;
  std::vector<chunk::Pieces> placed;
};

// Of a host, of a device, of two ranks on a host.
class ChunkFetchTest : public testing::TestWithParam<std::string> {
 protected:
  static constexpr int32_t kChunks = 6;
  static constexpr chunk::Digest kSpace{3};

  void SetUp() override {
    Devices devices;
    if (on_device())
      devices.push_back(std::make_shared<test::FakeDeviceBackend>());
    else
      devices.push_back(kernels::MakeCpuBackend());
    if (GetParam() == "ranks") devices.push_back(kernels::MakeCpuBackend());
    auto model = Model::Load(test::kTinyModel, devices, {.kv_dtype = test::KvType()});
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *model;
    shape_ = {model_->config().num_layers, model_->config().num_kv_heads};
    const auto pages = static_cast<int32_t>(shape_.num_streams() * 4 * kChunks);
    memory_.emplace(AllocateKvMemory(*model_, pages).value());
    pool_ = std::make_unique<PagePool>(memory_->pages, model_->backends());
    std::mt19937 random(5);
    text_.resize(kChunks * 64 - 60);
    for (int32_t& token : text_) token = static_cast<int32_t>(random() % 4000);
    source_kv_ = std::make_unique<SequenceKv>(*pool_, shape_);
    ASSERT_TRUE(source_kv_->Reserve(kChunks * 64).ok());
    for (const int32_t page : source_kv_->AllPages()) {
      auto* const words = reinterpret_cast<uint32_t*>(pool_->view().k(page));
      for (size_t i = 0; i < model_->page_bytes() / 4; ++i) words[i] = random();
    }
    source_kv_->set_num_tokens(kChunks * 64);
  }

  // At position 0 by itself, elsewhere behind known text.
  static SourceContext ContextAt(int32_t begin) {
    return SourceContextOf(kSpace, Tokens(static_cast<size_t>(begin), 3), begin, begin);
  }
  static bool on_device() { return GetParam() == "device"; }
  std::vector<chunk::ChunkKey> Keys() const { return SegmentIndex(model_->kv_fingerprint()).KeysOf(kSpace, text_); }
  void FillPrefix() {
    const auto keys = Keys();
    for (int32_t i = 0; i < kChunks; ++i)
      store_.chunks.push_back(PackChunk(*source_kv_, i, keys[static_cast<size_t>(i)], *model_).value());
  }
  void FillSegment(int32_t begin) {
    const auto keys = Keys();
    const SegmentSource source(*source_kv_, begin, text_, ContextAt(begin));
    for (int32_t i = 0; i < PagesFor(static_cast<int64_t>(source.tokens().size())); ++i)
      store_.chunks.push_back(PackSegmentChunk(source, i, keys[static_cast<size_t>(i)], *model_).value());
  }
  std::vector<std::byte> Payload(std::span<const int32_t> pages) const {
    std::vector<std::byte> bytes(pages.size() * model_->page_bytes());
    EXPECT_TRUE(pool_->ReadPages(pages, bytes.data()).ok());
    return bytes;
  }
  bool InPool(const chunk::Pieces& pieces) const {
    return std::all_of(pieces.begin(), pieces.end(), [&](const auto& piece) {
      return std::any_of(memory_->buffers.begin(), memory_->buffers.end(), [&](const auto& buffer) {
        const auto* const begin = static_cast<const std::byte*>(buffer->data());
        return piece.data() >= begin && piece.data() + piece.size() <= begin + buffer->size();
      });
    });
  }
  static std::chrono::steady_clock::time_point Soon() {
    return std::chrono::steady_clock::now() + std::chrono::seconds(20);
  }
  FetchedPrefix Fetch(
      SequenceKv& kv, int32_t first_page = 0, const std::function<bool()>& stop = [] { return false; }) {
    return FetchPrefix(store_, Keys(), first_page, *model_, kv, Soon(), stop);
  }
  FetchedSegment FetchText(const std::function<bool(int64_t)>& make_room = [](int64_t) { return true; }) {
    return FetchSegment(store_, Keys(), text_, *model_, *pool_, Soon(), make_room);
  }

  std::shared_ptr<const Model> model_;
  KvShape shape_;
  std::optional<KvMemory> memory_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<SequenceKv> source_kv_;
  Tokens text_;
  RestlessStore store_;
};

TEST_P(ChunkFetchTest, APrefixArrivesInItsPages) {
  FillPrefix();
  SequenceKv kv(*pool_, shape_);
  ASSERT_TRUE(kv.Reserve(kChunks * 64).ok());
  const FetchedPrefix fetched = Fetch(kv);
  EXPECT_EQ(fetched.num_chunks, kChunks);
  EXPECT_EQ(fetched.num_bytes, kChunks * static_cast<int64_t>(ChunkPayloadBytes(*model_)));
  for (int32_t i = 0; i < kChunks; ++i) EXPECT_EQ(Payload(kv.PagesOfChunk(i)), store_.chunks[i].payload) << i;
  for (const auto& pieces : store_.placed) EXPECT_EQ(InPool(pieces), !on_device()) << "no copy where none is needed";
}

TEST_P(ChunkFetchTest, APrefixEndsWhereSomethingIsWrong) {
  FillPrefix();
  const auto fetch = [&](const std::function<void(chunk::ChunkHeader&)>& change, int32_t chunk) {
    const std::vector<chunk::Chunk> right = store_.chunks;
    change(store_.chunks[static_cast<size_t>(chunk)].header);
    SequenceKv kv(*pool_, shape_);
    EXPECT_TRUE(kv.Reserve(kChunks * 64).ok());
    const int32_t count = Fetch(kv).num_chunks;
    store_.chunks = right;
    return count;
  };
  EXPECT_EQ(fetch([](auto& h) { h.first_position += 64; }, 4), 4);
  EXPECT_EQ(fetch([](auto& h) { h.provenance = chunk::Provenance::kCanon; }, 3), 3);
  EXPECT_EQ(fetch([](auto& h) { h.model_fingerprint[0] ^= 1; }, 0), 0);
  EXPECT_EQ(fetch([](auto& h) { h.layout_digest[0] ^= 1; }, 2), 2);
  EXPECT_EQ(fetch([](auto& h) { h.num_tokens = 63; }, 5), 5);
  EXPECT_EQ(fetch([](auto& h) { --h.payload_bytes; }, 1), 1);
  store_.damaged = 2;
  EXPECT_EQ(fetch([](auto&) {}, 0), 2);
  SequenceKv kv(*pool_, shape_);
  ASSERT_TRUE(kv.Reserve(kChunks * 64).ok());
  EXPECT_EQ(Fetch(kv, 0, [] { return true; }).num_chunks, 0) << "cancelled";
}

TEST_P(ChunkFetchTest, ASegmentArrivesInPagesOfItsOwn) {
  for (const int32_t begin : {0, 37}) {
    store_.chunks.clear();
    FillSegment(begin);
    const auto fetched = FetchText();
    ASSERT_NE(fetched.source, nullptr);
    const auto count = static_cast<int32_t>(store_.chunks.size());
    EXPECT_EQ(fetched.source->begin(), begin);
    EXPECT_EQ(fetched.source->isolated(), begin == 0);
    EXPECT_EQ(fetched.source->context().front, ContextAt(begin).front);
    EXPECT_EQ(fetched.source->context().front.known(), begin != 0);
    for (int32_t i = 0; i < count; ++i) {
      std::vector<int32_t> pages;
      for (int32_t s = 0; s < shape_.num_streams(); ++s) {
        pages.push_back(fetched.source->page(s, i * 64));
        const int32_t head = s % shape_.num_kv_heads;
        EXPECT_EQ(pool_->view().rank_of(pages.back()), head * pool_->view().num_ranks() / shape_.num_kv_heads);
      }
      EXPECT_EQ(Payload(pages), store_.chunks[static_cast<size_t>(i)].payload) << i;
    }
  }
  for (const auto& pieces : store_.placed) {
    EXPECT_EQ(InPool(pieces), !on_device());
    if (pool_->view().num_ranks() == 1) {
      EXPECT_EQ(pieces.size(), 1u) << "neighbours are one piece";
    }
  }
}

TEST_P(ChunkFetchTest, PagesOfWhatDidNotComeGoBack) {
  FillSegment(0);
  const int64_t free = pool_->num_free();
  store_.damaged = 3;
  {
    const auto fetched = FetchText();
    ASSERT_NE(fetched.source, nullptr);
    EXPECT_EQ(fetched.source->tokens().size(), 3u * 64);
    EXPECT_EQ(pool_->num_free(), free - 3 * shape_.num_streams());
  }
  store_.damaged = 0;
  EXPECT_EQ(FetchText().source, nullptr);
  store_.damaged = SIZE_MAX;
  store_.chunks[2].header.first_position += 1;  // of another context
  {
    const auto fetched = FetchText();
    ASSERT_NE(fetched.source, nullptr);
    EXPECT_EQ(fetched.source->tokens().size(), 2u * 64);
  }
  store_.chunks[2].header.first_position -= 1;
  store_.chunks[1].header.context.digest[0] ^= 1;  // at the same place behind other text
  {
    const auto fetched = FetchText();
    ASSERT_NE(fetched.source, nullptr);
    EXPECT_EQ(fetched.source->tokens().size(), 1u * 64);
  }
  store_.chunks[1].header.context.digest[0] ^= 1;
  int calls = 0;
  EXPECT_EQ(FetchText([&](int64_t pages) {
              EXPECT_EQ(pages, shape_.num_streams());
              return ++calls <= 3;  // the last chunks, which are placed first
            }).source,
            nullptr);
  EXPECT_EQ(pool_->num_free(), free);
  pool_->CheckInvariants();
}

INSTANTIATE_TEST_SUITE_P(Pools, ChunkFetchTest, testing::Values("host", "device", "ranks"),
                         [](const auto& info) { return info.param; });

TEST(PrefillCostTest, IsTheSumOfProductsAndAttention) {
  ModelConfig config;
  config.hidden_size = 8;
  config.intermediate_size = 10;
  config.num_layers = 3;
  config.num_qo_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 4;
  config.sliding_windows = {0, 5, 0};
  config.moe = {.num_experts = 6, .num_experts_per_token = 2, .intermediate_size = 7, .dense_layers = {0, 1}};
  const PrefillCost cost(config);
  const double projections = 2 * (8 * 16 + 8 * 16 + 16 * 8);  // q; k and v; out
  const double dense = projections + 2 * 3 * 8 * 10, experts = projections + 2 * (8 * 6 + 3 * 8 * 7 * 2);
  const double attention = 4 * 16;
  EXPECT_DOUBLE_EQ(cost.Of(9, 1), 2 * dense + experts + attention * (10 + 5 + 10));
  EXPECT_DOUBLE_EQ(cost.Of(0, 10) + cost.Of(10, 54), cost.Of(0, 64));
  const Tokens positions = {9, 20};
  EXPECT_DOUBLE_EQ(cost.Of(positions, 1, 2), 2 * (dense + attention * 5));
}

}  // namespace
}  // namespace spl::engine
