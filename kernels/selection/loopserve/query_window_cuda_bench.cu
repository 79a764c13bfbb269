// query_window_cuda_bench [FILTER]
//
// Times the steps of a progressive selection (query_window_cuda.h, K11) on one device: one that records and joins, and
// one that chooses, as a graph of layers with keys of their own, against the time of reading K once at a rate measured
// in the same run. The two variants' scores are compared.
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>

#include "kernels/cuda/cuda_bench_util.h"
#include "kernels/selection/loopserve/query_window_cuda.h"
#include "kernels/selection/top_tokens_cuda.h"

namespace spl::kernels::cuda {
namespace {

struct Case {
  const char* name;
  int batch;
  int32_t kv_len;
  int layers;
  int qo_heads = 32, kv_heads = 8;
  int32_t window = 16, budget = 1024;
};

class Setup {
 public:
  static constexpr int kDim = 128;

  explicit Setup(const Case& c) : c_(c), streams_(c.batch * c.kv_heads) {
    const int pages = (c.kv_len + kPageTokens - 1) / kPageTokens;
    const QueryWindow layout{.head_dim = kDim,
                             .group = c.qo_heads / c.kv_heads,
                             .window = c.window,
                             .budget = c.budget,
                             .query_dtype = DType::kBF16,
                             .page_bytes = size_t{2} * kPageTokens * kDim * 2};
    const int compact = static_cast<int>(layout.num_pages());
    const int num_pages = c.layers * streams_ * (pages + compact);
    std::vector<int32_t> ids(num_pages);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(1));
    const int64_t elements = int64_t{num_pages} * 2 * kPageTokens * kDim;
    auto* memory = Keep(Alloc<__nv_bfloat16>(elements));
    FillNormal<<<2048, 256>>>(memory, elements, 1);
    const int32_t* tables = Keep(Upload(ids));
    std::vector<int64_t> table_offset(c.batch);
    std::vector<StagedSequence> sequences(c.batch);
    for (int s = 0; s < c.batch; ++s) {
      table_offset[s] = int64_t{s} * c.kv_heads * pages;
      sequences[s] = {nullptr, int64_t{s} * c.kv_heads * compact, c.budget, 16};
    }
    const int64_t* offsets = Keep(Upload(table_offset));
    const int32_t* lengths = Keep(Upload(std::vector<int32_t>(c.batch, c.kv_len)));
    const StagedSequence* staged = Keep(Upload(sequences));
    constexpr int32_t kJoins = StagedStep::kRecords | StagedStep::kSelects;
    const auto steps = [&](int32_t flags) {
      return Keep(Upload(std::vector<StagedStep>(c.batch, StagedStep{flags, 1000})));
    };
    joins_ = steps(kJoins);
    chooses_ = steps(kJoins | StagedStep::kRefresh);
    const int64_t width = int64_t{c.qo_heads} * kDim;
    const int64_t stride = layout.list_tokens();
    scores_ = Keep(Alloc<float>(int64_t{streams_} * c.kv_len));
    for (int layer = 0; layer < c.layers; ++layer) {
      auto* q = Keep(Alloc<__nv_bfloat16>(c.batch * width));
      FillNormal<<<256, 256>>>(q, c.batch * width, 100 + layer);
      QueryWindowArgs a;
      a.shape = {c.qo_heads, c.kv_heads, kDim, 1.0f / std::sqrt(static_cast<float>(kDim))};
      a.pool = {reinterpret_cast<std::byte*>(memory), DType::kBF16, kDim, num_pages};
      a.window = c.window;
      a.q = {q, DType::kBF16};
      a.q_row_stride = width;
      a.scores = scores_;
      a.scores_stride = c.kv_len;
      a.lists = {Keep(Alloc<int32_t>(streams_ * stride)), Keep(Alloc<int32_t>(streams_)), stride};
      args_.push_back(a);
      QueryWindowLaunch l{.batch = {.page_tables = tables + int64_t{layer} * streams_ * pages,
                                    .table_offset = offsets,
                                    .head_stride = pages,
                                    .kv_len = lengths,
                                    .pool = a.pool,
                                    .num_sequences = c.batch},
                          .selection = {.sequences = staged,
                                        .steps = chooses_,
                                        .compact_tables = tables + int64_t{c.layers} * streams_ * pages +
                                                          int64_t{layer} * streams_ * compact,
                                        .compact_head_stride = compact},
                          .max_kv_len = c.kv_len,
                          .max_streams = streams_};
      if (scratch_ == nullptr) {
        const size_t bytes = QueryWindowScratchBytes(a, l);
        scratch_ = Keep(Alloc<std::byte>(bytes));
        CHECK_CUDA(cudaMemset(scratch_, 0, bytes));
      }
      l.scratch = scratch_;
      launches_.push_back(l);
    }
    CHECK_CUDA(cudaStreamCreate(&stream_));
    for (int i = 0; i < c.window; ++i) {  // queries in every slot
      std::vector<StagedStep> records(c.batch, StagedStep{StagedStep::kRecords, 1000 + i});
      const StagedStep* on_device = Keep(Upload(records));
      for (int layer = 0; layer < c.layers; ++layer) {
        QueryWindowLaunch l = launches_[layer];
        l.selection.steps = on_device;
        QueryWindowArgs a = args_[layer];
        a.q = args_[(layer + i) % c.layers].q;
        a.chooses = false;
        CHECK_CUDA(ChooseByQueryWindow(a, l, stream_));
      }
    }
    CHECK_CUDA(cudaStreamSynchronize(stream_));
  }
  ~Setup() {
    for (void* p : kept_) cudaFree(p);
    cudaStreamDestroy(stream_);
  }

  template <typename F>
  double LayerUs(const F& layer) {
    const int rounds = std::max(1, 12 / c_.layers);
    cudaGraphExec_t exec = Record(stream_, rounds * c_.layers, [&](int i) { layer(i % c_.layers); });
    cudaEvent_t begin, end;
    CHECK_CUDA(cudaEventCreate(&begin));
    CHECK_CUDA(cudaEventCreate(&end));
    std::vector<float> ms;
    for (int i = 0; i < 23; ++i) {
      CHECK_CUDA(cudaEventRecord(begin, stream_));
      CHECK_CUDA(cudaGraphLaunch(exec, stream_));
      CHECK_CUDA(cudaEventRecord(end, stream_));
      CHECK_CUDA(cudaEventSynchronize(end));
      ms.push_back(0);
      CHECK_CUDA(cudaEventElapsedTime(&ms.back(), begin, end));
    }
    std::nth_element(ms.begin() + 3, ms.begin() + 13, ms.end());
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaGraphExecDestroy(exec);
    return 1e3 * ms[13] / (rounds * c_.layers);
  }
  void Choose(int layer, WindowVariant variant = WindowVariant::kAuto) {
    CHECK_CUDA(ChooseByQueryWindow(args_[layer], launches_[layer], stream_, variant));
  }
  void Join(int layer) {  // the count in the list pages stays below the list's stride
    QueryWindowLaunch l = launches_[layer];
    l.selection.steps = joins_;
    QueryWindowArgs a = args_[layer];
    a.chooses = false;
    CHECK_CUDA(ChooseByQueryWindow(a, l, stream_));
  }
  void Top(int layer) {
    const QueryWindowArgs& a = args_[layer];
    const TopTokensArgs top{.scores = a.scores,
                            .scores_stride = a.scores_stride,
                            .granularity = 1,
                            .num_kv_heads = c_.kv_heads,
                            .lists = a.lists};
    CHECK_CUDA(TopTokens(top, launches_[layer].selection, launches_[layer].batch.kv_len, c_.batch, c_.kv_len, stream_,
                         static_cast<float>(c_.window * (c_.qo_heads / c_.kv_heads))));
  }
  std::vector<float> Scores() {
    CHECK_CUDA(cudaStreamSynchronize(stream_));
    std::vector<float> scores(int64_t{streams_} * c_.kv_len);
    CHECK_CUDA(cudaMemcpy(scores.data(), scores_, scores.size() * 4, cudaMemcpyDeviceToHost));
    return scores;
  }
  double KeyBytes() const { return 2.0 * kDim * streams_ * c_.kv_len; }

 private:
  template <typename T>
  T* Keep(T* p) {
    kept_.push_back(const_cast<void*>(static_cast<const void*>(p)));
    return p;
  }

  const Case c_;
  const int streams_;
  cudaStream_t stream_ = nullptr;
  const StagedStep *joins_ = nullptr, *chooses_ = nullptr;
  float* scores_ = nullptr;
  std::byte* scratch_ = nullptr;
  std::vector<QueryWindowArgs> args_;
  std::vector<QueryWindowLaunch> launches_;
  std::vector<void*> kept_;
};

void Run(const Case& c, double rate) {
  Setup s(c);
  const double floor = s.KeyBytes() / rate * 1e6;
  const double choose = s.LayerUs([&](int l) { s.Choose(l); });
  const double join = s.LayerUs([&](int l) { s.Join(l); });
  s.Choose(0);
  const std::vector<float> got = s.Scores();
  const double top = s.LayerUs([&](int l) { s.Top(l); });
  double error = 0, sum = 0;
  if (c.kv_len <= 32768 && c.batch == 1) {
    s.Choose(0, WindowVariant::kGeneric);
    const std::vector<float> want = s.Scores();
    double difference = 0, size = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      difference += std::pow(double{got[i]} - want[i], 2);
      size += std::pow(double{want[i]}, 2);
      sum += got[i];
    }
    error = std::sqrt(difference / size);
    sum /= c.kv_heads * c.window * (c.qo_heads / c.kv_heads);
  }
  std::printf(
      "%-12s record and join %6.2f us; choose %8.2f us, of it top %6.2f us; K once %7.2f us: %5.2f x, %4.0f %%; "
      "a step of %d %6.2f us; error %.1e, mass %.5f\n",
      c.name, join, choose, top, floor, choose / floor, 100 * floor / choose, c.window,
      join + (choose - join) / c.window, error, sum);
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  AllocateFlushBuffer();
  const double rate = ReadRate(int64_t{4} << 30);
  std::printf("read %.3f TB/s\n", rate * 1e-12);
  const Case cases[] = {{"B1 32K", 1, 32768, 12},
                        {"B1 8K", 1, 8192, 12},
                        {"B1 16K", 1, 16384, 12},
                        {"B1 128K", 1, 131072, 6},
                        {"B8 32K", 8, 32768, 3},
                        {"B8 8K", 8, 8192, 6},
                        {"B1 32K G8", 1, 32768, 12, 64, 8},
                        {"B1 32K w32", 1, 32768, 12, 32, 8, 32}};
  for (const Case& c : cases) {
    if (std::string(c.name).find(filter) != std::string::npos) Run(c, rate);
  }
  return 0;
}

}  // namespace
}  // namespace spl::kernels::cuda

int main(int argc, char** argv) { return spl::kernels::cuda::Main(argc, argv); }
