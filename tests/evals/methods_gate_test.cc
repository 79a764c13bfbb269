// A gate for answers: every method that recovers copies must answer about as many questions as the exact prefill, and
// more than copies that nobody recovers. It fails on a method that is broken, not on one that is a little worse: for
// that, splice eval takes more samples (docs/evaluation.md).
//
// contexts.jsonl.xz: 15 samples each of vt, coref, niah_multivalue and vt_update, of 1,024 tokens, made by
// tools/train/make_eval.py. In these tasks a document must know what another one says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/paths.h"
#include "tools/cli/eval_data.h"
#include "tools/cli/eval_run.h"
#include "tools/cli/local_cluster.h"

namespace spl::cli {
namespace {

constexpr size_t kSamples = 15;  // of each task; a task's samples stand together
constexpr size_t kTasks = 4;

class MethodsGate : public testing::Test {
 protected:
  // Right answers. Fails unless most of the copies are of that provenance.
  static int Right(const char* reuse, const char* provenance) {
    const auto method = ParseEvalMethod(reuse, "auto", provenance);
    EXPECT_TRUE(method.ok()) << method.status();
    EvalRun run(*generator_, {});
    for (size_t i = 0; i < samples_.size(); ++i) {
      const size_t of_task = i / kSamples * kSamples;
      const absl::Status status = run.Run(samples_[i], *method, &samples_[of_task + (i + 1) % kSamples]);
      EXPECT_TRUE(status.ok()) << status;
      if (!status.ok()) return 0;
    }
    int right = 0, total = 0, of_provenance = 0;
    const std::string copies = std::string_view(provenance) == "context" ? "same_context" : provenance;
    const nlohmann::json report = run.report().ToJson();
    for (const auto& row : report["rows"]) {
      if (row["task"] == "core tasks") continue;
      right += static_cast<int>(std::lround(row["accuracy"].get<double>() * row["n"].get<double>()));
      for (const auto& [kind, count] : row["copies"].items()) total += count.get<int>();
      of_provenance += row["copies"][copies].get<int>();
    }
    std::printf("%-8s %-9s %2d of %zu, %d of %d copied tokens are %s\n", reuse, provenance, right, samples_.size(),
                of_provenance, total, copies.c_str());
    EXPECT_GE(of_provenance, total * 9 / 10);
    EXPECT_EQ(total > 0, std::string_view(reuse) != "exact");
    return right;
  }

  static void SetUpTestSuite() {
    auto samples = LoadEvalData("tests/evals/contexts.jsonl.xz");
    ASSERT_TRUE(samples.ok()) << samples.status();
    ASSERT_EQ(samples->size(), kSamples * kTasks);
    samples_ = *std::move(samples);
    LocalClusterOptions options;
    options.model.dir = test::kTinyModel;
    options.backend = "cpu";
    options.http_listen = options.grpc_listen = "127.0.0.1:0";
    options.kv_bytes = 512 << 20;
    options.store_memory_bytes = 64 << 20;
    options.fidelity_share = 0;
    auto cluster = LocalCluster::Start(options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    auto generator = MakeEndpointGenerator({.url = "http://" + cluster_->http_address()});
    ASSERT_TRUE(generator.ok()) << generator.status();
    generator_ = *std::move(generator);
  }
  static void TearDownTestSuite() {
    generator_.reset();
    if (cluster_ != nullptr) cluster_->Stop();
    cluster_.reset();
    samples_.clear();
  }
  void SetUp() override { ASSERT_NE(generator_, nullptr); }

  static inline std::vector<EvalSample> samples_;
  static inline std::unique_ptr<LocalCluster> cluster_;
  static inline std::unique_ptr<TextGenerator> generator_;
};

// Measured: exact and every one of the others 58, naive 23, the mirror image of the chosen rows 30 and 31.
TEST_F(MethodsGate, RecoveredCopiesAnswer) {
  EXPECT_GE(Right("exact", "context"), 55);
  EXPECT_LE(Right("naive", "isolated"), 40);  // without recovery: what the bounds below must exclude
  for (const char* provenance : {"isolated", "foreign", "context"}) {
    EXPECT_GE(Right("sparsex", provenance), 54) << provenance;
  }
  EXPECT_GE(Right("samkv", "isolated"), 54);
  EXPECT_GE(Right("splice", "isolated"), 54);
}

}  // namespace
}  // namespace spl::cli
