// Edge-mass restore in a whole model in which exactly one query head looks past its window: at a needle that is planted
// far in front of the question. That head, and no other one, must be restored (docs/methods/redknot.md, "Restore").
#include <gmock/gmock.h>

#include <optional>

#include "services/engine/engine.h"
#include "services/engine/methods/recovery_methods.h"
#include "services/engine/runtime/prompt_run.h"
#include "tests/services/engine/prompt_runs.h"
#include "tests/support/engine_devices.h"
#include "tests/support/plain_model.h"
#include "tests/support/seeded_random.h"
#include "tests/support/temp_dir.h"

namespace spl::engine {
namespace {

using test::PlainModel;
using Tokens = std::vector<int32_t>;

constexpr int32_t kWindow = 64, kSinks = 4, kProbes = 64;
constexpr int32_t kFirstLocal = 2;               // layers below serve all heads as global ones
constexpr int32_t kNeedle = 500;                 // the token
constexpr int32_t kConstant = 0, kIsNeedle = 1;  // channels of the hidden state: the same in all tokens; the needle's
constexpr double kBeacon = 8;

// Queries and keys of every head make attention fall off steeply with the distance; one query head asks for the needle
// instead. The slowest pair of channels hardly turns, so that the needle is found at any distance.
PlainModel PlantedModel(std::mt19937& random, int32_t layer, int32_t q_head) {
  const PlainModel::Shape shape{.layers = 6, .theta = 1e6};
  PlainModel model(shape, random, 0.05);
  PlainModel::Matrix& embedding = model.at("model.embed_tokens.weight");
  for (int32_t token = 0; token < shape.vocab; ++token) {
    double* const row = &embedding[static_cast<size_t>(token * shape.hidden)];
    for (int32_t c = 0; c < shape.hidden; ++c) row[c] *= 0.25;
    row[kConstant] = kBeacon;
    row[kIsNeedle] = token == kNeedle ? kBeacon : 0;
  }
  const auto set = [&](int32_t of_layer, const char* what, int32_t head, int32_t channel, int32_t from, double value) {
    model.at(PlainModel::Name(of_layer,
                              what))[static_cast<size_t>((head * shape.head_dim + channel) * shape.hidden + from)] =
        static_cast<float>(value);
  };
  const int32_t slowest = shape.head_dim / 2 - 1;
  for (int32_t i = 0; i < shape.layers; ++i) {
    for (const char* what : {"self_attn.q_proj", "self_attn.k_proj"}) {
      PlainModel::Matrix& weights = model.at(PlainModel::Name(i, what));
      std::fill(weights.begin(), weights.end(), 0);
    }
    for (int32_t channel = 0; channel < 3; ++channel) {
      for (int32_t h = 0; h < shape.kv_heads; ++h) set(i, "self_attn.k_proj", h, channel, kConstant, 2);
      for (int32_t h = 0; h < shape.q_heads; ++h) {
        if (i != layer || h != q_head) set(i, "self_attn.q_proj", h, channel, kConstant, 2);
      }
    }
  }
  set(layer, "self_attn.q_proj", q_head, slowest, kConstant, 2);
  set(layer, "self_attn.k_proj", q_head / (shape.q_heads / shape.kv_heads), slowest, kIsNeedle, 2);
  return model;
}

// Attention of the last rows outside of window and sinks, in double: mean over the rows.
double EdgeMassOf(const PlainModel& model, const PlainModel::Heads& heads, int32_t q_head, int32_t length) {
  double outside = 0;
  for (int32_t row = length - kProbes; row < length; ++row) {
    const std::vector<double> attention = model.Attention(heads, q_head, row);
    for (int32_t j = kSinks; j <= row - kWindow; ++j) outside += attention[j];
  }
  return outside / kProbes;
}

class PlantedNeedleTest : public ::testing::TestWithParam<int> {
 protected:
  std::vector<int32_t> Restored(const std::string& folder, const Tokens& tokens) {
    const auto model = Model::Load(folder, *test::DevicesOf("cpu", GetParam()));
    EXPECT_TRUE(model.ok()) << model.status();
    const ModelConfig& config = (*model)->config();
    const HeadClassMap map(config.num_layers, config.num_kv_heads,
                           std::vector<HeadClass>(static_cast<size_t>(config.num_layers * config.num_kv_heads),
                                                  {.is_global = false, .window = kWindow, .sinks = kSinks}));
    const KvMemory memory = AllocateKvMemory(**model, PagesForTokens(config, 1024)).value();
    Poison(**model, memory);
    PagePool pool(memory.pages, (*model)->backends());
    const auto executor = ParallelExecutor::Create(*model, memory.pages, {.num_threads = 2, .max_rows = 640}).value();
    SequenceKv kv(pool, KvShapeOf(config));
    EXPECT_TRUE(kv.Reserve(static_cast<int64_t>(tokens.size())).ok());
    const auto policy =
        MakeRecoveryPolicy({.policy = "redknot", .ffn_mass = 1, .restore_share = 1, .restore_threshold = 0.15}, config,
                           &map)
            .value();
    PromptRun run(tokens, {}, kv, *policy);
    (void)RunToEnd(run, *executor, 640);
    return run.restored_heads();
  }
};

TEST_P(PlantedNeedleTest, RestoresTheHeadThatLooksAtItAndNoOther) {
  std::mt19937 random = test::SeededRandom("planted needle");
  constexpr int32_t kLength = 400;
  const PlainModel::Shape shape{.layers = 6};
  for (int32_t layer = kFirstLocal; layer < shape.layers && !HasFailure(); ++layer) {
    const auto q_head = static_cast<int32_t>(random() % static_cast<uint32_t>(shape.q_heads));
    const int32_t kv_head = q_head / (shape.q_heads / shape.kv_heads);
    const PlainModel model = PlantedModel(random, layer, q_head);
    testing::TempDir folder;
    model.Save(folder.path());
    for (const bool far : {true, false}) {
      Tokens tokens = test::RandomTokens(random, kLength, kNeedle);
      // In the sinks every row sees it.
      const int32_t at = far ? 20 + static_cast<int32_t>(random() % 200) : 2;
      tokens[static_cast<size_t>(at)] = kNeedle;
      // The plan worked: in double, one head has its attention outside.
      const std::vector<PlainModel::Heads> heads = model.Forward(tokens, shape.layers);
      for (int32_t i = kFirstLocal; i < shape.layers; ++i) {
        for (int32_t h = 0; h < shape.q_heads; ++h) {
          const double edge = EdgeMassOf(model, heads[static_cast<size_t>(i)], h, kLength);
          if (far && i == layer && h == q_head) {
            EXPECT_GT(edge, 0.9);
          } else {
            EXPECT_LT(edge, 0.02) << "layer " << i << " head " << h;
          }
        }
      }
      const std::vector<int32_t> want =
          far ? std::vector<int32_t>{layer * shape.kv_heads + kv_head} : std::vector<int32_t>();
      EXPECT_EQ(Restored(folder.path(), tokens), want) << "needle at " << at;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, PlantedNeedleTest, ::testing::Values(1, 2));

}  // namespace
}  // namespace spl::engine
