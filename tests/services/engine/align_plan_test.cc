#include "services/engine/cache/align_plan.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "services/engine/cache/page_pool.h"

namespace spl::engine {
namespace {

constexpr KvShape kShape{.num_layers = 7, .num_kv_heads = 3};

class AlignPlanTest : public testing::Test {
 protected:
  static constexpr int32_t kPages = 600;
  AlignPlanTest() {
    EXPECT_TRUE(source_.Reserve(400).ok());
    source_.set_num_tokens(400);
    EXPECT_TRUE(target_.Reserve(500).ok());
    config_.num_layers = kShape.num_layers;
    config_.num_kv_heads = kShape.num_kv_heads;
    config_.head_dim = 8;
    const std::vector<int32_t> text(300);
    for (const int32_t target : {17, 330}) {
      const auto copied = std::span(text).first(target == 17 ? 300 : 90);
      hits_.push_back({std::make_shared<SegmentSource>(source_, 40, copied, SourceContext{.isolated = true}), 0, target,
                       static_cast<int32_t>(copied.size())});
    }
  }

  std::vector<char> memory_ = std::vector<char>(kPages * 2 * 64 * 8 * sizeof(float));
  PagePool pool_{{reinterpret_cast<std::byte*>(memory_.data()), kernels::DType::kF32, 8, kPages}};
  SequenceKv source_{pool_, kShape}, target_{pool_, kShape};
  std::vector<SegmentHit> hits_;
  ModelConfig config_;
};

TEST_F(AlignPlanTest, PlansOfStretchesAreTogetherThatOfAllLayers) {
  const Range cached{2, kShape.num_layers};
  const AlignPlan all = MakeAlignPlans(hits_, target_, cached, config_).front();
  ASSERT_EQ(all.num_streams, 15);
  ASSERT_GT(all.runs.size(), 7u);
  for (const int64_t most_entries : {1, 45, 60, 1'000'000}) {
    int64_t layer = cached.begin;
    for (const Range& layers : AlignStretches(hits_, cached, kShape.num_kv_heads, most_entries)) {
      ASSERT_EQ(layers.begin, layer);
      ASSERT_GT(layers.end, layers.begin);
      const AlignPlan plan = MakeAlignPlans(hits_, target_, layers, config_).front();
      ASSERT_EQ(plan.num_streams, layers.size() * kShape.num_kv_heads);
      EXPECT_EQ(plan.cos, all.cos);
      EXPECT_EQ(plan.sin, all.sin);
      ASSERT_EQ(plan.runs.size(), all.runs.size());
      const int64_t first = (layers.begin - cached.begin) * kShape.num_kv_heads;
      for (size_t run = 0; run < plan.runs.size(); ++run) {
        for (int32_t s = 0; s < plan.num_streams; ++s) {
          const size_t part = run * plan.num_streams + s, whole = run * all.num_streams + first + s;
          EXPECT_EQ(plan.src_pages[part], all.src_pages[whole]) << layers.begin << " " << run << " " << s;
          EXPECT_EQ(plan.dst_pages[part], all.dst_pages[whole]) << layers.begin << " " << run << " " << s;
        }
      }
      layer = layers.end;
    }
    EXPECT_EQ(layer, cached.end);
  }
}

// 300 and 90 tokens are in five and two pages of three heads: 21 entries a layer.
TEST_F(AlignPlanTest, StretchesHaveNoMoreEntriesThanAsked) {
  const auto sizes = [&](int64_t most_entries) {
    std::vector<int64_t> sizes;
    for (const Range& layers : AlignStretches(hits_, {0, 7}, kShape.num_kv_heads, most_entries))
      sizes.push_back(layers.size());
    return sizes;
  };
  EXPECT_EQ(sizes(20), (std::vector<int64_t>(7, 1)));
  EXPECT_EQ(sizes(63), (std::vector<int64_t>{3, 3, 1}));
  EXPECT_EQ(sizes(146), (std::vector<int64_t>{6, 1}));
  EXPECT_EQ(sizes(147), (std::vector<int64_t>{7}));
  EXPECT_TRUE(AlignStretches(hits_, {7, 7}, kShape.num_kv_heads).empty());
  EXPECT_EQ(AlignStretches({}, {0, 7}, kShape.num_kv_heads).size(), 1u);
}

}  // namespace
}  // namespace spl::engine
