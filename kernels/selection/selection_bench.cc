// Decode steps over chosen tokens on the CPU, as a share of the copy rate of the same run: the scores by themselves,
// the whole choice, attention over the lists that it makes, and attention over everything.
#include <benchmark/benchmark.h>

#include <cmath>
#include <memory>
#include <numeric>

#include "kernels/attention/attention.h"
#include "kernels/common/bench_util.h"
#include "kernels/selection/sparcas/compact_keys.h"
#include "kernels/selection/sparcas/select_tokens.h"
#include "kernels/selection/sparcas/select_tokens_isa.h"

namespace spl::kernels {
namespace {

struct Shape {
  int32_t sequences, context, qo_heads, kv_heads, head_dim, num_dims, budget;
};

class Setup {
 public:
  explicit Setup(const Shape& shape) : shape_(shape), compact_{shape.head_dim, shape.num_dims} {
    const int32_t pages = (shape.context + kPageTokens - 1) / kPageTokens;
    const auto compact_pages = static_cast<int32_t>(compact_.num_pages(shape.context));
    const int32_t streams = shape.sequences * shape.kv_heads;
    pool_.dtype = DType::kBF16;
    pool_.head_dim = shape.head_dim;
    pool_.num_pages = streams * (pages + compact_pages);
    memory_ = std::move(MakeCpuBackend()->Allocate(pool_.page_bytes() * pool_.num_pages)).value();
    pool_.base = static_cast<std::byte*>(memory_->data());
    const std::vector<float> values = bench::Normals(size_t{1} << 20);
    auto* to = reinterpret_cast<bf16*>(pool_.base);
    const size_t elements = pool_.page_bytes() / 2 * static_cast<size_t>(pool_.num_pages);
    for (size_t i = 0; i < elements; ++i) to[i] = ToBf16(values[(i + i / 1000) % values.size()]);
    std::vector<int32_t> order(static_cast<size_t>(pool_.num_pages));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937_64(2));
    auto next = order.begin();
    const auto take = [&](int32_t n) {
      std::vector<int32_t> taken(next, next + n);
      next += n;
      return taken;
    };
    for (int32_t i = 0; i < streams; ++i) {
      tables_.push_back(take(pages));
      compact_tables_.push_back(take(compact_pages));
    }
    q_ = bench::Normals(static_cast<size_t>(shape.sequences) * shape.qo_heads * shape.head_dim);
    out_.resize(q_.size());
    dims_.resize(static_cast<size_t>(streams) * 2 * shape.num_dims);
    tokens_.resize(static_cast<size_t>(streams) * shape.budget);
    counts_.resize(static_cast<size_t>(streams));
    for (int32_t i = 0; i < streams; ++i) {
      table_spans_.emplace_back(tables_[i]);
      compact_spans_.emplace_back(compact_tables_[i]);
      views_.push_back({tables_[i], shape.context, {VisibilityRule::kSelected}});
    }
    const auto heads = static_cast<size_t>(shape.kv_heads);
    for (size_t s = 0; s < static_cast<size_t>(shape.sequences); ++s) {
      sequences_.push_back({std::span(table_spans_).subspan(s * heads, heads),
                            std::span(compact_spans_).subspan(s * heads, heads),
                            shape.context,
                            {.selects = true, .refresh = true, .first = true},
                            shape.budget,
                            64,
                            dims_.data() + s * heads * 2 * shape.num_dims});
    }
    (void)Select();
    for (SelectingSequence& s : sequences_) s.step = {.selects = true, .parity = 1, .compact_len = shape.context - 1};
  }

  absl::Status Select() {
    SelectTokensArgs a;
    a.shape = attention_shape();
    a.pool = pool_;
    a.num_dims = shape_.num_dims;
    a.q = q_.data();
    a.q_row_stride = shape_.qo_heads * shape_.head_dim;
    a.sequences = sequences_;
    a.lists = {tokens_.data(), counts_.data(), shape_.budget};
    return cpu::SelectTokens(bench::Context(), a);
  }
  absl::Status Attend(VisibilityRule rule) {
    for (HeadStreamView& v : views_) v.visibility.rule = rule;
    DecodeAttentionArgs a;
    a.shape = attention_shape();
    a.pool = pool_;
    a.q = q_.data();
    a.q_row_stride = shape_.qo_heads * shape_.head_dim;
    a.out = out_.data();
    a.streams = views_;
    a.lists = {tokens_.data(), counts_.data(), shape_.budget};
    return cpu::DecodeAttention(bench::Context(), a);
  }
  // Nothing but the scores, into a buffer that stays in the cache.
  void Score() {
    const cpu::SelectTokensKernels& kernels = cpu::SelectTokensKernelsFor(bench::Context().isa);
    const int32_t group = shape_.qo_heads / shape_.kv_heads;
    const int32_t tiles_per_page = compact_.page_tokens() / kPageTokens;
    const int32_t num_tiles = (shape_.context + kPageTokens - 1) / kPageTokens;
    ParallelTasks(bench::Context(), static_cast<int64_t>(compact_tables_.size()), [&](int64_t stream) {
      thread_local std::vector<float> scores;
      scores.resize(static_cast<size_t>(group) * compact_.page_tokens());
      for (int32_t tile = 0; tile < num_tiles; tile += tiles_per_page) {
        kernels.score_tiles({.keys = pool_.k(compact_tables_[stream][tile / tiles_per_page]),
                             .q = q_.data(),
                             .scores = scores.data(),
                             .score_stride = compact_.page_tokens(),
                             .dtype = DType::kBF16,
                             .num_tiles = std::min(tiles_per_page, num_tiles - tile),
                             .num_heads = group,
                             .num_dims = shape_.num_dims});
      }
    });
  }
  double compact_bytes() const {
    return 2.0 * shape_.num_dims * static_cast<double>(compact_tables_.size()) * shape_.context;
  }
  double list_bytes() const {
    return 4.0 * shape_.head_dim * static_cast<double>(compact_tables_.size()) * shape_.budget;
  }

 private:
  AttentionShape attention_shape() const {
    return {shape_.qo_heads, shape_.kv_heads, shape_.head_dim, 1.0f / std::sqrt(static_cast<float>(shape_.head_dim))};
  }
  const Shape shape_;
  const CompactKeys compact_;
  KvPoolView pool_;
  std::unique_ptr<Buffer> memory_;
  std::vector<std::vector<int32_t>> tables_, compact_tables_;
  std::vector<std::span<const int32_t>> table_spans_, compact_spans_;
  std::vector<HeadStreamView> views_;
  std::vector<SelectingSequence> sequences_;
  std::vector<float> q_, out_;
  std::vector<int32_t> dims_, tokens_, counts_;
};

// sequences, context, query heads, KV heads, head_dim, num_dims, budget
void SparseDecode(benchmark::State& state) {
  const auto arg = [&](int i) { return static_cast<int32_t>(state.range(i)); };
  Setup s({arg(0), arg(1), arg(2), arg(3), arg(4), arg(5), arg(6)});
  const double rate = bench::CopyBytesPerSecond();
  const double score = bench::BestSeconds([&] { s.Score(); }), select = bench::BestSeconds([&] { (void)s.Select(); });
  const double attend = bench::BestSeconds([&] { (void)s.Attend(VisibilityRule::kSelected); });
  const double dense = bench::BestSeconds([&] { (void)s.Attend(VisibilityRule::kFull); });
  for (auto _ : state) {
    absl::Status status = s.Select();
    if (status.ok()) status = s.Attend(VisibilityRule::kSelected);
    if (!status.ok()) state.SkipWithError(status.ToString().c_str());
  }
  state.counters["copy_GBps"] = rate * 1e-9;
  state.counters["score_us"] = score * 1e6;
  state.counters["score_of_copy"] = s.compact_bytes() / score / rate;
  state.counters["select_us"] = select * 1e6;
  state.counters["select_of_copy"] = s.compact_bytes() / select / rate;
  state.counters["attend_us"] = attend * 1e6;
  state.counters["attend_of_copy"] = s.list_bytes() / attend / rate;
  state.counters["dense_us"] = dense * 1e6;
  state.counters["factor"] = dense / (select + attend);
}
BENCHMARK(SparseDecode)
    ->ArgNames({"sequences", "context", "qo_heads", "kv_heads", "head_dim", "num_dims", "budget"})
    ->Args({1, 32768, 32, 8, 128, 16, 2048})
    ->Args({8, 32768, 8, 4, 64, 16, 2048})
    ->Args({1, 131072, 8, 4, 64, 16, 2048})
    ->UseRealTime()
    ->MinTime(0.1);

}  // namespace
}  // namespace spl::kernels
