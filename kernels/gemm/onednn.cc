#include "kernels/gemm/onednn.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <dnnl.hpp>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/common/plugin.h"
#include "kernels/common/scratch.h"
#include "kernels/gemm/gemm_validate.h"

namespace spl::kernels::cpu {
namespace {

using dnnl::matmul;
using dnnl::memory;

dnnl::engine& Engine() {
  static dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

// One per thread, and the place where a thread that meets oneDNN gives up its OpenMP team. The function is looked up,
// not linked: it lives in whichever OpenMP library oneDNN brought along.
dnnl::stream& Stream() {
  thread_local dnnl::stream stream = [] {
    using SetNumThreads = void (*)(int);
    static const auto set = reinterpret_cast<SetNumThreads>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
    if (set != nullptr) set(1);
    return dnnl::stream(Engine());
  }();
  return stream;
}

memory::desc RowMajor(int64_t rows, int64_t columns) {
  return memory::desc({rows, columns}, memory::data_type::f32, memory::format_tag::ab);
}

absl::Status FromError(const char* what, const dnnl::error& e) {
  const std::string text = absl::StrCat("oneDNN: ", what, ": ", e.what());
  return e.status == dnnl_unimplemented ? absl::UnimplementedError(text) : absl::InternalError(text);
}

matmul::primitive_desc MatmulDesc(int64_t rows, const memory::desc& weight, bool bias) {
  const int64_t k = weight.dims()[0], n = weight.dims()[1];
  const memory::desc x = RowMajor(rows, k), y = RowMajor(rows, n);
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (!bias) return matmul::primitive_desc(matmul::desc(x, weight, y), attr, Engine());
  return matmul::primitive_desc(matmul::desc(x, weight, RowMajor(1, n), y), attr, Engine());
}

// A generated program, and the data that a call needs with it. Stateless: threads share it.
struct Program {
  explicit Program(const matmul::primitive_desc& d)
      : run(d), x(d.src_desc()), w(d.weights_desc()), b(d.bias_desc()), y(d.dst_desc()), scratch(d.scratchpad_desc()) {}
  matmul run;
  memory::desc x, w, b, y, scratch;
};

// Programs by shape, shared by all weights. Making one costs 0.2 ms, so that the steady state must find it here; the
// least recently used one goes when the cache is full.
class ProgramCache {
 public:
  // rows, in_features, columns, column block, distance of column blocks, bias
  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, bool>;

  template <typename Make>
  std::shared_ptr<const Program> Get(const Key& key, const Make& make) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (const auto it = index_.find(key); it != index_.end()) {
        order_.splice(order_.begin(), order_, it->second);
        return it->second->second;
      }
    }
    std::shared_ptr<const Program> program = make();  // outside the lock; two threads may both make it, one wins
    std::lock_guard<std::mutex> lock(mutex_);
    if (const auto it = index_.find(key); it != index_.end()) return it->second->second;
    order_.emplace_front(key, std::move(program));
    index_.emplace(key, order_.begin());
    if (order_.size() > kProgramsMax) {
      index_.erase(order_.back().first);
      order_.pop_back();
    }
    return order_.front().second;
  }

 private:
  static constexpr size_t kProgramsMax = 2048;
  using Order = std::list<std::pair<Key, std::shared_ptr<const Program>>>;

  std::mutex mutex_;  // guards order_ and index_
  Order order_;       // most recently used first
  std::map<Key, Order::iterator> index_;
};

ProgramCache& Programs() {
  static auto* cache = new ProgramCache;  // never destroyed: threads may outlive main's statics
  return *cache;
}

// A program with the argument objects of one thread: making those anew costs 2 us per call, half of a small product.
struct BoundProgram {
  explicit BoundProgram(std::shared_ptr<const Program> p)
      : program(std::move(p)),
        args{{DNNL_ARG_SRC, memory(program->x, Engine(), nullptr)},
             {DNNL_ARG_WEIGHTS, memory(program->w, Engine(), nullptr)},
             {DNNL_ARG_DST, memory(program->y, Engine(), nullptr)},
             {DNNL_ARG_SCRATCHPAD, memory(program->scratch, Engine(), nullptr)}} {
    if (program->b.get_size() > 0) args.emplace(DNNL_ARG_BIAS, memory(program->b, Engine(), nullptr));
  }

  void Set(int arg, const void* data) { args.find(arg)->second.set_data_handle(const_cast<void*>(data)); }

  std::shared_ptr<const Program> program;
  std::unordered_map<int, memory> args;
};

// The calling thread's own programs, looked up before the shared cache: no lock in the steady state.
template <typename Make>
BoundProgram& Bind(const ProgramCache::Key& key, const Make& make) {
  constexpr size_t kBoundMax = 512;
  thread_local std::map<ProgramCache::Key, BoundProgram> bound;
  const auto it = bound.find(key);
  if (it != bound.end()) return it->second;
  if (bound.size() == kBoundMax) bound.clear();
  return bound.emplace(key, BoundProgram(Programs().Get(key, make))).first->second;
}

class Matrix final : public OneDnnMatrix {
 public:
  int64_t column_block() const override { return block; }
  absl::Status Multiply(const float* x, int64_t num_rows, int64_t begin, int64_t num_columns, const float* bias,
                        float* y) const override;

  memory::desc layout;  // [in_features, out_features], blocked
  memory data;
  int64_t in_features = 0;
  int64_t block = 0;   // columns per block
  int64_t stride = 0;  // elements from one column block to the next

  // The columns [begin, begin + n) as a matrix of their own, and where they start.
  memory::desc Columns(int64_t begin, int64_t n) const {
    memory::desc part = layout.submemory_desc({in_features, n}, {0, begin});
    part.data.offset0 = 0;
    return part;
  }
  char* ColumnsAt(int64_t begin) const {
    return static_cast<char*>(data.get_data_handle()) + begin / block * stride * int64_t{sizeof(float)};
  }

  // Block by block, so that the widened copy stays small beside a weight of gigabytes.
  void Fill(const WeightView& w) {
    const int64_t rows_at_once = std::max<int64_t>(block, (int64_t{1} << 20) / w.in_features / block * block);
    std::vector<float> wide(static_cast<size_t>(std::min(rows_at_once, w.out_features) * w.in_features));
    for (int64_t begin = 0; begin < w.out_features; begin += rows_at_once) {
      const int64_t n = std::min(rows_at_once, w.out_features - begin);
      WidenWeight(w, begin * w.in_features, n * w.in_features, wide.data());
      memory from({{w.in_features, n}, memory::data_type::f32, memory::format_tag::ba}, Engine(), wide.data());
      memory to(Columns(begin, n), Engine(), ColumnsAt(begin));
      dnnl::reorder(from, to).execute(Stream(), from, to);
      Stream().wait();
    }
  }
};

absl::StatusOr<std::unique_ptr<OneDnnMatrix>> Pack(const WeightView& w) try {
  Stream();  // single-threaded from here on: the layout and the programs may depend on it
  const memory::desc any({w.in_features, w.out_features}, memory::data_type::f32, memory::format_tag::any);
  const matmul::primitive_desc desc = MatmulDesc(kOneDnnRowsMax, any, false);
  auto matrix = std::make_unique<Matrix>();
  matrix->in_features = w.in_features;
  matrix->layout = desc.weights_desc();
  const auto& blocking = matrix->layout.data.format_desc.blocking;
  matrix->block = 1;
  for (int i = 0; i < blocking.inner_nblks; ++i)
    matrix->block *= blocking.inner_idxs[i] == 1 ? blocking.inner_blks[i] : 1;
  matrix->stride = blocking.strides[1];
  const bool blocked = matrix->layout.data.format_kind == dnnl_blocked && matrix->block > 1;
  if (!blocked || std::string(desc.impl_info_str()).rfind("brg", 0) != 0) {
    return absl::UnimplementedError(absl::StrCat("oneDNN has no blocked product here (", desc.impl_info_str(), ")"));
  }
  matrix->data = memory(matrix->layout, Engine());
  matrix->Fill(w);
  return std::unique_ptr<OneDnnMatrix>(std::move(matrix));
} catch (const dnnl::error& e) {
  return FromError("packing a weight", e);
}

absl::Status Matrix::Multiply(const float* x, int64_t num_rows, int64_t begin, int64_t num_columns, const float* bias,
                              float* y) const try {
  thread_local Scratch scratch;
  dnnl::stream& stream = Stream();
  const int64_t k = in_features;
  const ProgramCache::Key key{num_rows, k, num_columns, block, stride, bias != nullptr};
  BoundProgram& call = Bind(key, [&] {
    return std::make_shared<const Program>(MatmulDesc(num_rows, Columns(begin, num_columns), bias != nullptr));
  });

  call.Set(DNNL_ARG_SRC, x);
  call.Set(DNNL_ARG_WEIGHTS, ColumnsAt(begin));
  call.Set(DNNL_ARG_DST, y);
  call.Set(DNNL_ARG_SCRATCHPAD, scratch.Bytes(call.program->scratch.get_size() + 64));
  if (bias != nullptr) call.Set(DNNL_ARG_BIAS, bias + begin);
  call.program->run.execute(stream, call.args);
  stream.wait();
  return absl::OkStatus();
} catch (const dnnl::error& e) {
  return FromError("multiplying", e);
}

}  // namespace
}  // namespace spl::kernels::cpu

extern "C" __attribute__((visibility("default"))) spl::kernels::cpu::OneDnnMatrix* splice_onednn_pack(
    const char* build, const spl::kernels::WeightView& weight, absl::Status& error) {
  if (std::strcmp(build, spl::kernels::PluginBuild()) != 0) {
    error = absl::FailedPreconditionError("libsplice_onednn.so is of another build than the program");
    return nullptr;
  }
  auto matrix = spl::kernels::cpu::Pack(weight);
  error = matrix.status();
  return matrix.ok() ? matrix->release() : nullptr;
}
