// The Backend of libsplice_cuda.so: every operation is validated, handed the batch of its session, and launched on the
// session's stream. Nothing here waits for the device but Copy, Allocate and what sessions say.
#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/activation/activation_cuda.h"
#include "kernels/activation/activation_validate.h"
#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/listed_keys.h"
#include "kernels/attention/listed_keys_cuda.h"
#include "kernels/collective/collective_nccl.h"
#include "kernels/common/backend.h"
#include "kernels/common/plugin.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/cuda_plugin.h"
#include "kernels/cuda/cuda_session.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/embedding/embedding_cuda.h"
#include "kernels/embedding/scatter_rows_cuda.h"
#include "kernels/fill/fill_cuda.h"
#include "kernels/gemm/gemm_cuda.h"
#include "kernels/gemm/gemm_validate.h"
#include "kernels/gemm/skinny_gemm_cuda.h"
#include "kernels/kv_copy/align_copy_cuda.h"
#include "kernels/kv_copy/crc32c_cuda.h"
#include "kernels/kv_copy/fuse_rows_cuda.h"
#include "kernels/moe/moe_cuda.h"
#include "kernels/norm/norm_cuda.h"
#include "kernels/norm/norm_validate.h"
#include "kernels/norm/row_norms_cuda.h"
#include "kernels/rope/rope_cuda.h"
#include "kernels/sampling/argmax_cuda.h"
#include "kernels/selection/candidates_cuda.h"
#include "kernels/selection/column_scores_cuda.h"
#include "kernels/selection/page_bound_scores_cuda.h"
#include "kernels/selection/pool_scores_cuda.h"
#include "kernels/selection/query_window_cuda.h"
#include "kernels/selection/select_lines_cuda.h"
#include "kernels/selection/select_tokens_cuda.h"
#include "kernels/selection/top_k_cuda.h"
#include "kernels/selection/top_tokens_cuda.h"
#include "kernels/selection/value_deviation_cuda.h"

namespace spl::kernels::cuda {
namespace {

// What Export makes: where the memory is for its own process, and CUDA's handle for the others of the host.
struct MemoryHandle {
  uint64_t process[2] = {};
  uint64_t address = 0;
  uint64_t bytes = 0;
  char gpu[16] = {};
  cudaIpcMemHandle_t ipc{};
};

class ImportedBuffer final : public Buffer {
 public:
  ImportedBuffer(void* data, size_t size, bool opened) : data_(data), size_(size), opened_(opened) {}
  ~ImportedBuffer() override {
    if (opened_) (void)cudaIpcCloseMemHandle(data_);
  }
  void* data() const override { return data_; }
  size_t size() const override { return size_; }

 private:
  void* const data_;
  const size_t size_;
  const bool opened_;
};

// Page-locked memory is read and written by the device itself.
bool IsPinned(const void* host) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, host) != cudaSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  return attributes.type == cudaMemoryTypeHost;
}

constexpr size_t kCopyChunkBytes = 32 << 20;  // of pinned memory; two of them keep disk, memory and link busy

class CudaBackend final : public Backend {
 public:
  CudaBackend(const CudaOptions& options, const cudaDeviceProp& properties)
      : device_(options.device),
        gemm_(options.gemm),
        deterministic_(options.deterministic),
        properties_(properties),
        gemm_plans_(options.deterministic) {}
  ~CudaBackend() override {
    for (cudaStream_t stream : {copy_stream_, checksum_stream_}) {
      if (stream != nullptr) (void)cudaStreamDestroy(stream);
    }
    for (cudaEvent_t event : copied_) {
      if (event != nullptr) (void)cudaEventDestroy(event);
    }
  }

  absl::Status Init() {
    SPLICE_CUDA_RETURN_IF_ERROR(cudaSetDevice(device_), "choosing the GPU");
    SPLICE_CUDA_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&copy_stream_, cudaStreamNonBlocking), "creating a stream");
    // Checksums are short and waited for: they go ahead of a prompt's products that were launched before them.
    int lowest = 0, highest = 0;
    SPLICE_CUDA_RETURN_IF_ERROR(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "creating a stream");
    SPLICE_CUDA_RETURN_IF_ERROR(cudaStreamCreateWithPriority(&checksum_stream_, cudaStreamNonBlocking, highest),
                                "creating a stream");
    for (cudaEvent_t& event : copied_)
      SPLICE_CUDA_RETURN_IF_ERROR(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event");
    return absl::OkStatus();
  }

  std::string name() const override { return "cuda"; }
  std::string description() const override {
    return absl::StrFormat("cuda: GPU %d, %s (sm_%d%d, %d multiprocessors, %.0f GiB)", device_, properties_.name,
                           properties_.major, properties_.minor, properties_.multiProcessorCount,
                           static_cast<double>(properties_.totalGlobalMem) / (1024.0 * 1024 * 1024));
  }
  bool host_memory() const override { return false; }
  DType activation_dtype(DType weights) const override { return PlainType(weights); }

  absl::StatusOr<std::unique_ptr<Session>> NewSession(const SessionOptions& options) const override {
    return CudaSession::Create(device_, options);
  }
  absl::StatusOr<std::unique_ptr<Buffer>> Allocate(size_t bytes) const override {
    SPLICE_CUDA_RETURN_IF_ERROR(cudaSetDevice(device_), "choosing the GPU");
    return AllocateDevice(bytes);
  }

  absl::Status PinHost(void* data, size_t bytes) const override {
    SPLICE_CUDA_RETURN_IF_ERROR(cudaSetDevice(device_), "choosing the GPU");
    const cudaError_t error = cudaHostRegister(data, bytes, cudaHostRegisterPortable);
    if (error != cudaSuccess) (void)cudaGetLastError();
    if (error == cudaErrorHostMemoryAlreadyRegistered)
      return absl::AlreadyExistsError("cuda: this host memory is page-locked already");
    return ToStatus(error, "page-locking host memory");
  }
  void UnpinHost(void* data) const override { (void)cudaHostUnregister(data); }

  absl::StatusOr<std::string> Export(const Buffer& buffer) const override {
    SPLICE_CUDA_RETURN_IF_ERROR(cudaSetDevice(device_), "choosing the GPU");
    MemoryHandle handle{.address = reinterpret_cast<uint64_t>(buffer.data()), .bytes = buffer.size()};
    std::memcpy(handle.process, ThisProcess().data(), sizeof(handle.process));
    std::memcpy(handle.gpu, properties_.uuid.bytes, sizeof(handle.gpu));
    SPLICE_CUDA_RETURN_IF_ERROR(cudaIpcGetMemHandle(&handle.ipc, buffer.data()), "exporting device memory");
    return std::string(reinterpret_cast<const char*>(&handle), sizeof(handle));
  }
  absl::StatusOr<std::unique_ptr<Buffer>> Import(const std::string& bytes) const override {
    MemoryHandle handle;
    if (bytes.size() != sizeof(handle)) return absl::InvalidArgumentError("cuda: not a handle of device memory");
    std::memcpy(&handle, bytes.data(), sizeof(handle));
    SPLICE_CUDA_RETURN_IF_ERROR(cudaSetDevice(device_), "choosing the GPU");
    // CUDA does not open a handle in the process that made it, and need not.
    if (std::memcmp(handle.process, ThisProcess().data(), sizeof(handle.process)) == 0) {
      if (absl::Status s = EnablePeer(handle.gpu); !s.ok()) return s;
      return std::make_unique<ImportedBuffer>(reinterpret_cast<void*>(handle.address), handle.bytes, false);
    }
    void* data = nullptr;
    if (const cudaError_t error = cudaIpcOpenMemHandle(&data, handle.ipc, cudaIpcMemLazyEnablePeerAccess);
        error != cudaSuccess) {
      (void)cudaGetLastError();
      return absl::FailedPreconditionError(
          absl::StrCat("cuda: the peer's device memory cannot be reached from here: ", cudaGetErrorString(error)));
    }
    return std::make_unique<ImportedBuffer>(data, handle.bytes, true);
  }

  absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> NewGroup(
      std::span<const Backend* const> ranks) const override {
    std::vector<int> devices;
    for (const Backend* rank : ranks) {
      if (rank->name() != name()) return absl::InvalidArgumentError("cuda: a group with ranks on other devices");
      devices.push_back(static_cast<const CudaBackend*>(rank)->device_);
    }
    return MakeNcclGroup(devices);
  }

  absl::Status PageChecksums(const KvPoolView& pool, std::span<const int32_t> pages, uint32_t* out) const override {
    if (pages.empty()) return absl::OkStatus();
    std::lock_guard lock(checksum_mutex_);
    SPLICE_CUDA_RETURN_IF_ERROR(cudaSetDevice(device_), "choosing the GPU");
    const size_t bytes = pages.size() * sizeof(int32_t);
    if (checksums_ == nullptr || checksums_->size() < 2 * bytes) {
      checksums_.reset();
      auto memory = AllocateDevice(std::bit_ceil(2 * bytes));
      if (!memory.ok()) return memory.status();
      auto host = AllocatePinned((*memory)->size());  // copies from and to other memory would hold the thread up
      if (!host.ok()) return host.status();
      checksums_ = *std::move(memory);
      host_checksums_ = *std::move(host);
    }
    auto* device_pages = static_cast<int32_t*>(checksums_->data());
    auto* device_out = reinterpret_cast<uint32_t*>(device_pages + pages.size());
    auto* host_pages = static_cast<int32_t*>(host_checksums_->data());
    auto* host_out = reinterpret_cast<uint32_t*>(host_pages + pages.size());
    for (size_t i = 0; i < pages.size(); ++i) host_pages[i] = pages[i] - pool.first_page;
    SPLICE_CUDA_RETURN_IF_ERROR(
        cudaMemcpyAsync(device_pages, host_pages, bytes, cudaMemcpyHostToDevice, checksum_stream_), "page checksums");
    SPLICE_CUDA_RETURN_IF_ERROR(cuda::PageChecksums(DevicePool(pool), device_pages, static_cast<int64_t>(pages.size()),
                                                    device_out, checksum_stream_),
                                "page checksums");
    SPLICE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(host_out, device_out, bytes, cudaMemcpyDeviceToHost, checksum_stream_),
                                "page checksums");
    SPLICE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(checksum_stream_), "page checksums");
    std::copy(host_out, host_out + pages.size(), out);
    return absl::OkStatus();
  }

  // On the stream of Copy: one behind the other, while checksums are taken beside them.
  absl::StatusOr<std::shared_ptr<const Fence>> StartCopy(CopyKind kind, std::span<const CopyOp> ops) const override {
    std::lock_guard lock(copy_mutex_);
    SPLICE_CUDA_RETURN_IF_ERROR(cudaSetDevice(device_), "choosing the GPU");
    const cudaMemcpyKind direction = kind == CopyKind::kWithin   ? cudaMemcpyDeviceToDevice
                                     : kind == CopyKind::kUpload ? cudaMemcpyHostToDevice
                                                                 : cudaMemcpyDeviceToHost;
    for (const CopyOp& op : ops)
      SPLICE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(op.to, op.from, op.bytes, direction, copy_stream_), "copying pages");
    return RecordEvent(copy_stream_, Waiting::kSpins);
  }

  using Backend::Copy;
  absl::Status Copy(CopyKind kind, std::span<const CopyOp> ops) const override {
    std::lock_guard lock(copy_mutex_);
    SPLICE_CUDA_RETURN_IF_ERROR(cudaSetDevice(device_), "choosing the GPU");
    switch (kind) {
      case CopyKind::kWithin:
        for (const CopyOp& op : ops)
          SPLICE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(op.to, op.from, op.bytes, cudaMemcpyDeviceToDevice, copy_stream_),
                                      "copying pages");
        break;
      case CopyKind::kUpload:
        if (absl::Status s = UploadLocked(ops); !s.ok()) return s;
        break;
      case CopyKind::kDownload:
        if (absl::Status s = DownloadLocked(ops); !s.ok()) return s;
        break;
    }
    return ToStatus(cudaStreamSynchronize(copy_stream_), "copying");
  }

  absl::StatusOr<std::unique_ptr<LinearWeight>> PackLinear(const WeightView& w) const override {
    if (absl::Status s = ValidateWeight(w); !s.ok()) return s;
    auto memory = Allocate(static_cast<size_t>(w.out_features * w.in_features) * DTypeBytes(w.dtype));
    if (!memory.ok()) return memory.status();
    if (absl::Status s = Copy(CopyKind::kUpload, (*memory)->data(), w.data, (*memory)->size()); !s.ok()) return s;
    return AdoptLinear(*std::move(memory), w);
  }
  absl::StatusOr<std::unique_ptr<LinearWeight>> AdoptLinear(std::unique_ptr<Buffer> data, WeightView w) const override {
    auto plain = Plain(std::move(data), w.dtype, w.out_features * w.in_features);
    if (!plain.ok()) return plain.status();
    return std::make_unique<DeviceWeight>(*std::move(plain), PlainType(w.dtype), w.out_features, w.in_features);
  }
  absl::StatusOr<std::unique_ptr<GroupedWeight>> AdoptGrouped(std::unique_ptr<Buffer> data,
                                                              GroupedWeightView w) const override {
    auto plain = Plain(std::move(data), w.dtype, w.num_experts * w.out_features * w.in_features);
    if (!plain.ok()) return plain.status();
    w.dtype = PlainType(w.dtype);
    return std::make_unique<DeviceGroupedWeight>(*std::move(plain), w);
  }
  absl::Status FillRandom(const KernelContext&, const FillRandomArgs& a) const override {
    if (absl::Status s = ValidateFillRandom(a); !s.ok()) return s;
    std::lock_guard lock(copy_mutex_);
    SPLICE_CUDA_RETURN_IF_ERROR(cudaSetDevice(device_), "choosing the GPU");
    SPLICE_CUDA_RETURN_IF_ERROR(cuda::FillRandom(a, copy_stream_), "FillRandom");
    return ToStatus(cudaStreamSynchronize(copy_stream_), "FillRandom");
  }

  absl::Status Linear(const KernelContext& ctx, const LinearArgs& a) const override {
    if (absl::Status s = ValidateLinear(a); !s.ok()) return s;
    if (a.num_rows == 0) return absl::OkStatus();
    CudaSession& session = CudaSession::Of(ctx);
    // Not when deterministic: a row of a long prompt must come out of the same arithmetic as that of a decode step.
    if (!deterministic_ && a.num_rows <= kMaxSkinnyRows) {
      const auto& weight = static_cast<const DeviceWeight&>(*a.weight);
      if (weight.dtype() == DType::kBF16 && a.x.dtype == DType::kBF16) {
        const cudaError_t e = SkinnyGemm({.x = a.x.data,
                                          .w = weight.data(),
                                          .bias = a.bias,
                                          .y = a.y.data,
                                          .y_dtype = a.y.dtype,
                                          .num_rows = a.num_rows,
                                          .out_features = weight.out_features(),
                                          .in_features = weight.in_features()},
                                         session.stream());
        if (e != cudaErrorNotSupported) return ToStatus(e, "Linear");
      }
    }
    const GemmContext gemm{session.cublas(), session.gemm_workspace(), CudaSession::kGemmWorkspaceBytes,
                           session.stream()};
    if (absl::Status s = gemm_plans_.Multiply(gemm, a); !s.ok()) return s;
    return a.bias == nullptr ? absl::OkStatus() : ToStatus(AddBias(a, session.stream()), "AddBias");
  }
  absl::Status RmsNorm(const KernelContext& ctx, const RmsNormArgs& a) const override {
    if (absl::Status s = ValidateRmsNorm(a); !s.ok()) return s;
    return ToStatus(cuda::RmsNorm(a, CudaSession::Of(ctx).stream()), "RmsNorm");
  }
  absl::Status SiluMul(const KernelContext& ctx, const SiluMulArgs& a) const override {
    if (absl::Status s = ValidateSiluMul(a); !s.ok()) return s;
    return ToStatus(cuda::SiluMul(a, CudaSession::Of(ctx).stream()), "SiluMul");
  }
  absl::Status GatherRows(const KernelContext& ctx, const GatherRowsArgs& a) const override {
    CudaSession& session = CudaSession::Of(ctx);
    const int32_t* ids = session.batch().tokens;
    if (!a.ids_are_batch_tokens) {
      for (const int32_t id : a.ids) {
        if (id < 0 || id >= a.num_table_rows)
          return absl::InvalidArgumentError(
              absl::StrCat("GatherRows: id ", id, " is outside [0, ", a.num_table_rows, ")"));
      }
      auto staged = session.StageIds(a.ids);
      if (!staged.ok()) return staged.status();
      ids = *staged;
    }
    return ToStatus(cuda::GatherRows(a, ids, static_cast<int64_t>(a.ids.size()), session.stream()), "GatherRows");
  }
  absl::Status RopeWriteKv(const KernelContext& ctx, const RopeWriteKvArgs& a) const override {
    CudaSession& session = CudaSession::Of(ctx);
    RopeWriteKvArgs args = a;
    args.pool = DevicePool(a.pool);
    return ToStatus(cuda::RopeWriteKv(args, Rows(session.batch(), a.layer), session.stream()), "RopeWriteKv");
  }

  absl::Status PrefillAttention(const KernelContext& ctx, const PrefillAttentionArgs& a) const override {
    CudaSession& session = CudaSession::Of(ctx);
    const DeviceBatch& b = session.batch();
    PrefillArgs args{.heads = Heads(a.shape),
                     .batch = Batch(b, a.pool, a.layer),
                     .row_begin = b.row_begin,
                     .positions = b.positions,
                     .num_rows = b.num_rows,
                     .max_kv_len = b.max_kv_len,
                     .dtype = a.q.dtype,
                     .q = a.q.data,
                     .q_row_stride = a.q_row_stride,
                     .out = a.out.data,
                     .lse = a.lse,
                     .last_rows = a.last_rows};
    for (const PrefillSequence& sequence : a.sequences) {
      const bool first = &sequence == &a.sequences.front();
      if (absl::Status s = TakeRules(sequence.heads, first, false, args.rules, &args.skip_heads); !s.ok()) return s;
    }
    if (args.skip_heads != 0 && a.sequences.size() != 1)
      return absl::UnimplementedError("cuda: lists of tokens in a pass of several sequences");
    if (a.sequences.size() == 1) {
      if (absl::Status s = TakeLines(a.sequences.front(), a.pool, args); !s.ok()) return s;
    }
    auto workspace = session.Scratch(CudaSession::Use::kPrefillAttention, PrefillWorkspaceBytes());
    if (!workspace.ok()) return workspace.status();
    args.workspace = *workspace;
    if (args.skip_heads != 0) {
      if (absl::Status s = AttendLists(session, a, args); !s.ok()) return s;
    }
    return ToStatus(cuda::PrefillAttention(args, session.stream()), "PrefillAttention");
  }

  absl::Status DecodeAttention(const KernelContext& ctx, const DecodeAttentionArgs& a) const override {
    CudaSession& session = CudaSession::Of(ctx);
    const DeviceBatch& b = session.batch();
    DecodeArgs args{.heads = Heads(a.shape),
                    .batch = Batch(b, a.pool, a.layer),
                    .max_kv_len = b.max_kv_len,
                    .dtype = a.q.dtype,
                    .q = a.q.data,
                    .q_row_stride = a.q_row_stride,
                    .out = a.out.data,
                    .lse = a.lse,
                    .lists = a.lists};
    const size_t heads = static_cast<size_t>(a.shape.num_kv_heads);
    if (a.staged_plans) {
      if (b.plans == nullptr)
        return absl::FailedPreconditionError("cuda: attention over staged plans, none are staged");
      args.plans = b.plans + static_cast<int64_t>(a.layer) * a.shape.num_kv_heads;
      args.plan_offset = b.plan_offset;
    }
    for (size_t begin = 0; begin < a.streams.size() && !a.staged_plans; begin += heads) {
      if (absl::Status s =
              TakeRules(a.streams.subspan(begin, heads), begin == 0, a.lists.tokens != nullptr, args.rules);
          !s.ok())
        return s;
    }
    auto workspace = session.Scratch(CudaSession::Use::kDecodeAttention,
                                     DecodeWorkspaceBytes(args.heads, b.num_sequences, b.max_kv_len,
                                                          a.lists.tokens != nullptr ? a.lists.stride : 0));
    if (!workspace.ok()) return workspace.status();
    args.workspace = *workspace;
    // Stage copied tables and lengths before the first kernel of the pass; in a pass of one row a sequence that row is
    // the only position which the kernels since then have written.
    args.early = b.num_rows == b.num_sequences;
    return ToStatus(cuda::DecodeAttention(args, session.stream()), "DecodeAttention");
  }

  absl::Status AlignCopy(const KernelContext& ctx, const AlignCopyArgs& a) const override {
    if (absl::Status s = ValidateAlignCopy(a); !s.ok()) return s;
    CudaSession& session = CudaSession::Of(ctx);
    auto staged = session.StageArrays(CudaSession::Use::kAlignCopy, 0,
                                      {std::as_bytes(a.runs), std::as_bytes(a.src_pages), std::as_bytes(a.dst_pages),
                                       std::as_bytes(a.cos), std::as_bytes(a.sin)});
    if (!staged.ok()) return staged.status();
    const AlignCopyTables tables{.runs = reinterpret_cast<const AlignRun*>((*staged)[0]),
                                 .src_pages = reinterpret_cast<const int32_t*>((*staged)[1]),
                                 .dst_pages = reinterpret_cast<const int32_t*>((*staged)[2]),
                                 .cos = reinterpret_cast<const float*>((*staged)[3]),
                                 .sin = reinterpret_cast<const float*>((*staged)[4])};
    AlignCopyArgs args = a;
    args.pool.base = a.pool.base - static_cast<int64_t>(a.pool.first_page) * static_cast<int64_t>(a.pool.page_bytes());
    return ToStatus(cuda::AlignCopy(args, tables, session.stream()), "AlignCopy");
  }
  absl::Status ColumnScores(const KernelContext& ctx, const ColumnScoresArgs& a) const override {
    if (absl::Status s = ValidateColumnScores(a); !s.ok()) return s;
    if (a.probes.empty() || a.columns.empty()) return absl::OkStatus();
    CudaSession& session = CudaSession::Of(ctx);
    const DeviceBatch& b = session.batch();
    std::vector<int32_t> heads(a.kv_heads.begin(), a.kv_heads.end());
    if (heads.empty()) {
      heads.resize(static_cast<size_t>(a.shape.num_kv_heads));
      std::iota(heads.begin(), heads.end(), 0);
    }
    ColumnTables tables{.num_probes = static_cast<int32_t>(a.probes.size()),
                        .num_kv_heads = static_cast<int32_t>(heads.size())};
    uint64_t listed = 0;  // whose columns are all in their lists, so that only causality is left
    if (absl::Status s = TakeRules(a.rows.heads, true, false, tables.rules, &listed); !s.ok()) return s;
    const std::vector<ColumnPart> parts = ColumnParts(a.columns, &tables.num_scores);
    tables.num_parts = static_cast<int32_t>(parts.size());
    const size_t scratch_bytes =
        cuda::ColumnScratchBytes(a.shape, tables.num_probes, tables.num_kv_heads, tables.num_scores);
    auto staged = session.StageArrays(
        CudaSession::Use::kColumnScores, scratch_bytes,
        {std::as_bytes(a.probes), std::as_bytes(std::span(heads)), std::as_bytes(std::span(parts))});
    if (!staged.ok()) return staged.status();
    tables.probes = reinterpret_cast<const int32_t*>((*staged)[0]);
    tables.kv_heads = reinterpret_cast<const int32_t*>((*staged)[1]);
    tables.parts = reinterpret_cast<const ColumnPart*>((*staged)[2]);
    auto scratch = session.Scratch(CudaSession::Use::kColumnScores, scratch_bytes);
    if (!scratch.ok()) return scratch.status();
    tables.scratch = *scratch;
    return ToStatus(cuda::ColumnScores(a, Batch(b, a.pool, a.layer), b.positions, tables, session.stream()),
                    "ColumnScores");
  }
  absl::Status ScatterRows(const KernelContext& ctx, const ScatterRowsArgs& a) const override {
    if (absl::Status s = ValidateScatterRows(a); !s.ok()) return s;
    CudaSession& session = CudaSession::Of(ctx);
    const auto ids = session.StageIds(a.ids);
    if (!ids.ok()) return ids.status();
    return ToStatus(cuda::ScatterRows(a, *ids, session.stream()), "ScatterRows");
  }
  absl::Status RowNorms(const KernelContext& ctx, const RowNormsArgs& a) const override {
    if (absl::Status s = ValidateRowNorms(a); !s.ok()) return s;
    return ToStatus(cuda::RowNorms(a, CudaSession::Of(ctx).stream()), "RowNorms");
  }
  absl::Status PoolScores(const KernelContext& ctx, const PoolScoresArgs& a) const override {
    if (absl::Status s = ValidatePoolScores(a); !s.ok()) return s;
    return ToStatus(cuda::PoolScores(a, CudaSession::Of(ctx).stream()), "PoolScores");
  }
  absl::Status TopK(const KernelContext& ctx, const TopKArgs& a) const override {
    if (absl::Status s = ValidateTopK(a); !s.ok()) return s;
    return ToStatus(cuda::TopK(a, CudaSession::Of(ctx).stream()), "TopK");
  }
  absl::Status ListCandidates(const KernelContext& ctx, const ListCandidatesArgs& a) const override {
    if (absl::Status s = ValidateListCandidates(a); !s.ok()) return s;
    CudaSession& session = CudaSession::Of(ctx);
    const DeviceBatch& b = session.batch();
    if (absl::Status s = NeedSelection(b, "ListCandidates", a.pool.base, a.lists.tokens, a.lists.counts); !s.ok())
      return s;
    return ToStatus(cuda::ListCandidates(a, Selection(b, a.pool, a.num_kv_heads, a.layer, 0), b.kv_len, b.num_sequences,
                                         b.max_kv_len, session.stream()),
                    "ListCandidates");
  }
  absl::Status SelectTokens(const KernelContext& ctx, const SelectTokensArgs& a) const override {
    if (absl::Status s = ValidateSelectTokens(a); !s.ok()) return s;
    CudaSession& session = CudaSession::Of(ctx);
    const DeviceBatch& b = session.batch();
    if (absl::Status s = NeedSelection(b, "SelectTokens", a.q.data, a.lists.tokens, a.lists.counts); !s.ok()) return s;
    SelectArgs args{.heads = Heads(a.shape),
                    .batch = Batch(b, a.pool, a.layer),
                    .selection = Selection(b, a.pool, a.shape.num_kv_heads, a.layer, StagedStep::PlanBit(a.plan)),
                    .num_dims = a.num_dims,
                    .dims_offset = int64_t{a.layer} * a.shape.num_kv_heads * 2 * a.num_dims,
                    .max_kv_len = b.max_kv_len,
                    .dtype = a.q.dtype,
                    .q = a.q.data,
                    .q_row_stride = a.q_row_stride,
                    .lists = a.lists,
                    .weights = a.weights,
                    .weights_stride = a.weights_stride,
                    .listed = b.listed};
    auto scratch = session.Scratch(CudaSession::Use::kSelectTokens, SelectScratchBytes(args));
    if (!scratch.ok()) return scratch.status();
    args.scratch = static_cast<float*>(*scratch);
    args.early = b.num_rows == b.num_sequences;  // as in DecodeAttention
    return ToStatus(cuda::SelectTokens(args, session.stream()), "SelectTokens");
  }
  absl::Status TopTokens(const KernelContext& ctx, const TopTokensArgs& a) const override {
    if (absl::Status s = ValidateTopTokens(a); !s.ok()) return s;
    CudaSession& session = CudaSession::Of(ctx);
    const DeviceBatch& b = session.batch();
    if (absl::Status s = NeedSelection(b, "TopTokens", a.scores, a.lists.tokens, a.lists.counts); !s.ok()) return s;
    return ToStatus(cuda::TopTokens(a, Selection(b, a.pool, a.num_kv_heads, a.layer, StagedStep::PlanBit(a.plan)),
                                    b.kv_len, b.num_sequences, b.max_kv_len, session.stream()),
                    "TopTokens");
  }
  absl::Status ChooseByQueryWindow(const KernelContext& ctx, const QueryWindowArgs& a) const override {
    if (absl::Status s = ValidateQueryWindow(a); !s.ok()) return s;
    CudaSession& session = CudaSession::Of(ctx);
    const DeviceBatch& b = session.batch();
    if (absl::Status s = NeedSelection(b, "ChooseByQueryWindow", a.q.data, a.lists.tokens, a.lists.counts); !s.ok())
      return s;
    QueryWindowLaunch launch{
        .batch = Batch(b, a.pool, a.layer),
        .selection = Selection(b, a.pool, a.shape.num_kv_heads, a.layer, StagedStep::PlanBit(a.plan)),
        .max_kv_len = b.max_kv_len,
        .max_streams = static_cast<int32_t>(b.steps_stride) * a.shape.num_kv_heads};
    if (const size_t bytes = QueryWindowScratchBytes(a, launch); bytes > 0) {
      auto scratch = session.Scratch(CudaSession::Use::kQueryWindow, bytes);
      if (!scratch.ok()) return scratch.status();
      launch.scratch = *scratch;
    }
    return ToStatus(cuda::ChooseByQueryWindow(a, launch, session.stream()), "ChooseByQueryWindow");
  }
  absl::Status PageBoundScores(const KernelContext& ctx, const PageBoundScoresArgs& a) const override {
    if (absl::Status s = ValidatePageBoundScores(a); !s.ok()) return s;
    CudaSession& session = CudaSession::Of(ctx);
    const DeviceBatch& b = session.batch();
    if (absl::Status s = NeedSelection(b, "PageBoundScores", a.q.data, a.scores, a.pool.base); !s.ok()) return s;
    return ToStatus(
        cuda::PageBoundScores(a, Batch(b, a.pool, a.layer),
                              Selection(b, a.pool, a.shape.num_kv_heads, a.layer, StagedStep::PlanBit(a.plan)),
                              b.max_kv_len, session.stream()),
        "PageBoundScores");
  }
  absl::Status ValueDeviation(const KernelContext& ctx, const ValueDeviationArgs& a) const override {
    if (absl::Status s = ValidateValueDeviation(a); !s.ok()) return s;
    CudaSession& session = CudaSession::Of(ctx);
    return ToStatus(cuda::ValueDeviation(a, Rows(session.batch(), a.layer), session.stream()), "ValueDeviation");
  }
  absl::Status FuseRows(const KernelContext& ctx, const FuseRowsArgs& a) const override {
    if (absl::Status s = ValidateFuseRows(a); !s.ok()) return s;
    if (a.row_ids.empty()) return absl::OkStatus();
    CudaSession& session = CudaSession::Of(ctx);
    // Both steps of all layers of a pass blend the same rows.
    auto staged = session.StageChangedArrays(CudaSession::Use::kFuseRows, {std::as_bytes(a.row_ids)});
    if (!staged.ok()) return staged.status();
    FuseRowsArgs args = a;
    args.pool = DevicePool(a.pool);
    return ToStatus(cuda::FuseRows(args, Rows(session.batch(), a.layer), reinterpret_cast<const int32_t*>((*staged)[0]),
                                   session.stream()),
                    "FuseRows");
  }

  absl::Status SelectLines(const KernelContext& ctx, const SelectLinesArgs& a) const override {
    if (absl::Status s = ValidateSelectLines(a); !s.ok()) return s;
    if (a.shape.num_kv_heads > kMaxKvHeads)
      return absl::UnimplementedError(absl::StrCat("cuda: ", a.shape.num_kv_heads, " KV heads, at most ", kMaxKvHeads));
    CudaSession& session = CudaSession::Of(ctx);
    LineJob job{.plan = a.plan,
                .scratch = PlaceLineScratch(a.plan.scratch, a.plan.sizes),
                .options = a.options,
                .batch = Batch(session.batch(), a.pool, a.layer),
                .sequence = a.sequence,
                .q_dtype = a.q.dtype,
                .q = static_cast<const std::byte*>(a.q.data) +
                     a.rows.row_begin * a.q_row_stride * static_cast<int64_t>(DTypeBytes(a.q.dtype)),
                .q_row_stride = a.q_row_stride};
    for (int32_t h = 0; h < a.shape.num_kv_heads; ++h) {
      if (a.kv_heads.empty() || std::binary_search(a.kv_heads.begin(), a.kv_heads.end(), h))
        job.head[job.num_heads++] = static_cast<uint8_t>(h);
    }
    std::copy(a.samples.begin(), a.samples.end(), job.sample);
    if (absl::Status s = ToStatus(LineWeights(job, session.stream()), "SelectLines"); !s.ok()) return s;
    return ToStatus(LineChoiceAndTiles(job, session.stream()), "SelectLines");
  }
  absl::Status RouteExperts(const KernelContext& ctx, const RouteExpertsArgs& a) const override {
    if (absl::Status s = ValidateRouteExperts(a); !s.ok()) return s;
    return ToStatus(cuda::RouteExperts(a, CudaSession::Of(ctx).stream()), "RouteExperts");
  }
  absl::Status GroupedLinear(const KernelContext& ctx, const GroupedLinearArgs& a) const override {
    if (absl::Status s = ValidateGroupedLinear(a); !s.ok()) return s;
    return ToStatus(cuda::GroupedLinear(a, CudaSession::Of(ctx).stream()), "GroupedLinear");
  }
  absl::Status CombineExperts(const KernelContext& ctx, const CombineExpertsArgs& a) const override {
    if (absl::Status s = ValidateCombineExperts(a); !s.ok()) return s;
    return ToStatus(cuda::CombineExperts(a, CudaSession::Of(ctx).stream()), "CombineExperts");
  }
  absl::Status Argmax(const KernelContext& ctx, const ArgmaxArgs& a) const override {
    if (absl::Status s = ValidateArgmax(a); !s.ok()) return s;
    return ToStatus(cuda::Argmax(a, CudaSession::Of(ctx).stream()), "Argmax");
  }

 private:
  // f16 is always widened: its products may leave the range of f16, and bf16 would drop bits of the weights.
  DType PlainType(DType dtype) const {
    return dtype == DType::kBF16 && gemm_ != GemmCompute::kF32 ? DType::kBF16 : DType::kF32;
  }
  absl::StatusOr<std::unique_ptr<Buffer>> Plain(std::unique_ptr<Buffer> data, DType dtype, int64_t count) const {
    if (PlainType(dtype) == dtype) return data;
    auto wide = Allocate(static_cast<size_t>(count) * sizeof(float));
    if (!wide.ok()) return wide.status();
    std::lock_guard lock(copy_mutex_);
    SPLICE_CUDA_RETURN_IF_ERROR(Widen(data->data(), dtype, static_cast<float*>((*wide)->data()), count, copy_stream_),
                                "widening a weight");
    SPLICE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(copy_stream_), "widening a weight");
    return wide;
  }

  // Drawn once: process ids are reused and differ between containers.
  static const std::array<uint64_t, 2>& ThisProcess() {
    static const std::array<uint64_t, 2> id = [] {
      std::random_device random;
      const auto word = [&] { return static_cast<uint64_t>(random()) << 32 | random(); };
      return std::array<uint64_t, 2>{word(), word()};
    }();
    return id;
  }

  // Lets this GPU write memory of another one of the process.
  absl::Status EnablePeer(const char (&gpu)[16]) const {
    if (std::memcmp(gpu, properties_.uuid.bytes, sizeof(gpu)) == 0) return absl::OkStatus();
    int count = 0;
    SPLICE_CUDA_RETURN_IF_ERROR(cudaGetDeviceCount(&count), "looking for GPUs");
    for (int peer = 0; peer < count; ++peer) {
      cudaDeviceProp properties{};
      SPLICE_CUDA_RETURN_IF_ERROR(cudaGetDeviceProperties(&properties, peer), "reading a GPU's properties");
      if (std::memcmp(gpu, properties.uuid.bytes, sizeof(gpu)) != 0) continue;
      const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
      if (error == cudaSuccess) return absl::OkStatus();
      (void)cudaGetLastError();
      if (error == cudaErrorPeerAccessAlreadyEnabled) return absl::OkStatus();
      return absl::FailedPreconditionError(
          absl::StrCat("cuda: GPU ", device_, " cannot reach GPU ", peer, ": ", cudaGetErrorString(error)));
    }
    return absl::FailedPreconditionError("cuda: the peer's GPU is not of this machine");
  }

  static AttentionHeads Heads(const AttentionShape& s) {
    return {s.num_qo_heads, s.num_kv_heads, s.head_dim, s.sm_scale};
  }
  // As the staged page tables name its pages.
  static KvPoolView DevicePool(KvPoolView pool) {
    pool.first_page = 0;
    return pool;
  }
  static PagedBatch Batch(const DeviceBatch& b, const KvPoolView& pool, int32_t layer) {
    return {.page_tables = b.page_tables + layer * b.layer_stride,
            .table_offset = b.table_offset,
            .head_stride = b.head_stride,
            .kv_len = b.kv_len,
            .pool = DevicePool(pool),
            .num_sequences = b.num_sequences};
  }

  // A batch in which nobody selects was staged, or one of these is null.
  static absl::Status NeedSelection(const DeviceBatch& b, const char* op, const void* in, const void* out,
                                    const void* other) {
    if (in == nullptr || out == nullptr || other == nullptr)
      return absl::InvalidArgumentError(absl::StrCat("cuda: ", op, " with a null tensor"));
    if (!b.selects)
      return absl::FailedPreconditionError(
          absl::StrCat("cuda: ", op, " needs a batch staged with BatchSequence::selection"));
    return absl::OkStatus();
  }
  // plan: StagedStep::PlanBit of the sequences that are served; 0: of all.
  static SelectionBatch Selection(const DeviceBatch& b, const KvPoolView& pool, int32_t num_kv_heads, int32_t layer,
                                  int32_t plan) {
    return {.sequences = b.selecting,
            .steps = b.selection_steps + layer * b.steps_stride,
            .compact_tables = b.compact_tables + layer * num_kv_heads * b.compact_stride,
            .compact_head_stride = b.compact_stride,
            .plan = plan,
            .pool = pool.base,
            .page_bytes = static_cast<int64_t>(pool.page_bytes())};
  }

  static RopeBatch Rows(const DeviceBatch& b, int32_t layer) {
    return {.positions = b.positions,
            .row_sequence = b.row_sequence,
            .page_tables = b.page_tables + layer * b.layer_stride,
            .table_offset = b.table_offset,
            .head_stride = b.head_stride,
            .num_rows = b.num_rows};
  }
  static std::vector<ColumnPart> ColumnParts(std::span<const PositionRange> columns, int32_t* num_scores) {
    std::vector<ColumnPart> parts;
    *num_scores = 0;
    for (const PositionRange& range : columns) {
      for (int32_t j = range.begin; j < range.end;) {
        const int32_t slot = j % kPageTokens, count = std::min(range.end - j, kPageTokens - slot);
        parts.push_back({j / kPageTokens, slot, count, *num_scores});
        *num_scores += count;
        j += count;
      }
    }
    return parts;
  }

  // The heads that see lists of positions, as attention over pages with K and V of the lists (listed_keys.h).
  static absl::Status AttendLists(CudaSession& session, const PrefillAttentionArgs& a, PrefillArgs args) {
    const PrefillSequence& sequence = a.sequences.front();
    const DeviceBatch& b = session.batch();
    if (sequence.row_begin != 0 || sequence.row_end != b.num_rows ||
        sequence.positions.size() != static_cast<size_t>(b.num_rows))
      return absl::InvalidArgumentError(absl::StrCat("cuda: lists of rows [", sequence.row_begin, ", ",
                                                     sequence.row_end, ") of a staged pass of ", b.num_rows));
    const auto last_rows = a.last_rows > 0 ? std::min(a.last_rows, b.num_rows) : b.num_rows;
    args.rules = {};
    for (const ListedHeads& group : GroupByList(sequence.heads)) {
      const auto rows = ListRows(group.list, sequence.positions);
      if (!rows.ok()) return rows.status();
      HeadList heads;
      args.skip_heads = ~uint64_t{0};
      for (const int32_t h : group.kv_heads) {
        if (absl::Status s = CheckResident(rows->resident, sequence.heads[static_cast<size_t>(h)].page_table); !s.ok())
          return s;
        heads.head[heads.count++] = static_cast<uint8_t>(h);
        args.skip_heads &= ~(uint64_t{1} << h);
      }
      const int32_t num_pages = std::max(rows->num_pages(), 1), kv_len = static_cast<int32_t>(rows->list.size());
      std::vector<int32_t> tables(sequence.heads.size() * static_cast<size_t>(num_pages), kNoPage);
      for (int32_t n = 0; n < heads.count; ++n)
        std::iota(tables.begin() + int64_t{heads.head[n]} * num_pages,
                  tables.begin() + (int64_t{heads.head[n]} + 1) * num_pages, n * num_pages);
      constexpr int64_t kNoOffset = 0;
      auto staged = session.StageChangedArrays(
          CudaSession::Use::kPrefillLists,
          {std::as_bytes(rows->list), std::as_bytes(std::span(rows->positions)), std::as_bytes(std::span(tables)),
           std::as_bytes(std::span(&kv_len, 1)), std::as_bytes(std::span(&kNoOffset, 1))});
      if (!staged.ok()) return staged.status();
      const auto total_pages = heads.count * num_pages;
      auto pages =
          session.Scratch(CudaSession::Use::kListedPages, static_cast<size_t>(total_pages) * a.pool.page_bytes());
      if (!pages.ok()) return pages.status();
      const GatherListedArgs gather{.batch = Batch(b, a.pool, a.layer),
                                    .heads = heads,
                                    .list = reinterpret_cast<const int32_t*>((*staged)[0]),
                                    .count = kv_len,
                                    .num_pages = num_pages,
                                    .pages = *pages};
      if (absl::Status s = ToStatus(GatherListed(gather, session.stream()), "gathering a list's keys"); !s.ok())
        return s;
      const EmptyRowsArgs empty{.shape = args.heads,
                                .heads = heads,
                                .dtype = args.dtype,
                                .out = args.out,
                                .lse = args.lse,
                                .first_row = b.num_rows - last_rows,
                                .end_row = rows->num_empty};
      if (absl::Status s = ToStatus(WriteEmptyRows(empty, session.stream()), "rows that see nothing"); !s.ok())
        return s;
      // Attention runs the rows behind those: a tile of rows that see nothing is not for all of its variants.
      args.last_rows = std::min(last_rows, b.num_rows - rows->num_empty);
      if (args.last_rows == 0) continue;
      args.positions = reinterpret_cast<const int32_t*>((*staged)[1]);
      args.max_kv_len = kv_len;
      args.batch = {.page_tables = reinterpret_cast<const int32_t*>((*staged)[2]),
                    .table_offset = reinterpret_cast<const int64_t*>((*staged)[4]),
                    .head_stride = num_pages,
                    .kv_len = reinterpret_cast<const int32_t*>((*staged)[3]),
                    .pool = {static_cast<std::byte*>(*pages), a.pool.dtype, a.pool.head_dim, total_pages},
                    .num_sequences = 1};
      if (absl::Status s = ToStatus(cuda::PrefillAttention(args, session.stream()), "PrefillAttention"); !s.ok())
        return s;
    }
    return absl::OkStatus();
  }

  // The rules of one sequence's heads; those of the later sequences must be the same. With `listed`, heads of rule
  // kList are taken as kFull, and named there.
  static absl::Status TakeRules(std::span<const HeadStreamView> heads, bool first, bool has_lists, HeadRules& rules,
                                uint64_t* listed = nullptr) {
    if (heads.size() > kMaxKvHeads)
      return absl::UnimplementedError(absl::StrCat("cuda: ", heads.size(), " KV heads, at most ", kMaxKvHeads));
    for (size_t h = 0; h < heads.size(); ++h) {
      HeadVisibility v = heads[h].visibility;
      if (v.rule == VisibilityRule::kList && listed != nullptr) {
        *listed |= uint64_t{1} << h;
        v = {};
      }
      if (v.rule != VisibilityRule::kFull && v.rule != VisibilityRule::kBand && v.rule != VisibilityRule::kLines &&
          !(v.rule == VisibilityRule::kSelected && has_lists))
        return absl::UnimplementedError("cuda: attention over blocks or token lists");
      const HeadRule rule{v.rule, v.num_sinks, v.window};
      HeadRule& known = rules.head[h];
      if (first) {
        known = rule;
      } else if (known.rule != rule.rule || (rule.rule == VisibilityRule::kBand &&
                                             (known.num_sinks != rule.num_sinks || known.window != rule.window))) {
        return absl::UnimplementedError("cuda: sequences of one pass with different visibility, without staged plans");
      }
    }
    return absl::OkStatus();
  }

  // The lines of one sequence's heads, which lie as LinePlan lays them out.
  static absl::Status TakeLines(const PrefillSequence& sequence, const KvPoolView& pool, PrefillArgs& args) {
    const LineVisibility* first = nullptr;
    for (size_t h = 0; h < sequence.heads.size(); ++h) {
      if (sequence.heads[h].visibility.rule != VisibilityRule::kLines) continue;
      const LineVisibility* v = sequence.heads[h].visibility.lines;
      if (v == nullptr) return absl::InvalidArgumentError("cuda: visibility by lines without `lines`");
      const auto rows = static_cast<int32_t>(sequence.positions.size());
      if (v->num_rows != rows || rows == 0 || v->first_position != sequence.positions.front() ||
          sequence.positions.back() - sequence.positions.front() + 1 != rows)
        return absl::InvalidArgumentError(absl::StrCat("cuda: lines of ", v->num_rows, " rows from position ",
                                                       v->first_position, " for ", rows, " other ones"));
      const auto head = static_cast<int64_t>(h);
      const int64_t tiles = int64_t{v->num_row_tiles()} * v->tile_words;
      const int64_t masks = int64_t{v->num_row_tiles()} * v->column_words;
      PrefillLines lines{v->tiles - head * tiles,
                         v->column_masks - head * masks,
                         v->columns - head * 64 * v->column_words,
                         static_cast<const std::byte*>(v->column_pages) -
                             head * v->column_words * static_cast<int64_t>(pool.page_bytes()),
                         v->num_row_tiles(),
                         v->tile_words,
                         v->column_words};
      if (first != nullptr &&
          (lines.tiles != args.lines.tiles || lines.column_masks != args.lines.column_masks ||
           lines.columns != args.lines.columns || lines.column_pages != args.lines.column_pages ||
           lines.tile_words != args.lines.tile_words || lines.column_words != args.lines.column_words))
        return absl::UnimplementedError("cuda: lines of the heads of one call from different plans");
      first = v;
      args.lines = lines;
    }
    return absl::OkStatus();
  }

  absl::Status Pinned() const {
    for (auto& buffer : pinned_) {
      if (buffer != nullptr) continue;
      auto memory = AllocatePinned(kCopyChunkBytes);
      if (!memory.ok()) return memory.status();
      buffer = *std::move(memory);
    }
    return absl::OkStatus();
  }

  // Small pieces are packed into one pinned chunk; the host fills one chunk while the other travels.
  absl::Status UploadLocked(std::span<const CopyOp> ops) const {
    if (absl::Status s = Pinned(); !s.ok()) return s;
    int turn = 0;
    size_t used = 0;
    for (const CopyOp& op : ops) {
      if (IsPinned(op.from)) {
        SPLICE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(op.to, op.from, op.bytes, cudaMemcpyHostToDevice, copy_stream_),
                                    "copying to the GPU");
        continue;
      }
      for (size_t done = 0; done < op.bytes;) {
        if (used == kCopyChunkBytes) {
          SPLICE_CUDA_RETURN_IF_ERROR(cudaEventRecord(copied_[turn], copy_stream_), "copying to the GPU");
          turn ^= 1;
          used = 0;
          SPLICE_CUDA_RETURN_IF_ERROR(cudaEventSynchronize(copied_[turn]), "copying to the GPU");
        }
        const size_t size = std::min(op.bytes - done, kCopyChunkBytes - used);
        std::byte* stage = static_cast<std::byte*>(pinned_[turn]->data()) + used;
        std::memcpy(stage, static_cast<const std::byte*>(op.from) + done, size);
        SPLICE_CUDA_RETURN_IF_ERROR(
            cudaMemcpyAsync(static_cast<std::byte*>(op.to) + done, stage, size, cudaMemcpyHostToDevice, copy_stream_),
            "copying to the GPU");
        used += size;
        done += size;
      }
    }
    return absl::OkStatus();
  }

  absl::Status DownloadLocked(std::span<const CopyOp> ops) const {
    if (absl::Status s = Pinned(); !s.ok()) return s;
    struct Piece {
      void* to;
      size_t at, bytes;
    };
    std::vector<Piece> pieces;
    size_t used = 0;
    const auto drain = [&]() -> absl::Status {
      SPLICE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(copy_stream_), "copying from the GPU");
      for (const Piece& piece : pieces)
        std::memcpy(piece.to, static_cast<const std::byte*>(pinned_[0]->data()) + piece.at, piece.bytes);
      pieces.clear();
      used = 0;
      return absl::OkStatus();
    };
    for (const CopyOp& op : ops) {
      if (IsPinned(op.to)) {
        SPLICE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(op.to, op.from, op.bytes, cudaMemcpyDeviceToHost, copy_stream_),
                                    "copying from the GPU");
        continue;
      }
      for (size_t done = 0; done < op.bytes;) {
        if (used == kCopyChunkBytes) {
          if (absl::Status s = drain(); !s.ok()) return s;
        }
        const size_t size = std::min(op.bytes - done, kCopyChunkBytes - used);
        SPLICE_CUDA_RETURN_IF_ERROR(
            cudaMemcpyAsync(static_cast<std::byte*>(pinned_[0]->data()) + used,
                            static_cast<const std::byte*>(op.from) + done, size, cudaMemcpyDeviceToHost, copy_stream_),
            "copying from the GPU");
        pieces.push_back({static_cast<std::byte*>(op.to) + done, used, size});
        used += size;
        done += size;
      }
    }
    return drain();
  }

  const int device_;
  const GemmCompute gemm_;
  const bool deterministic_;
  const cudaDeviceProp properties_;
  mutable GemmPlans gemm_plans_;
  mutable std::mutex copy_mutex_;  // guards all up to the next blank line
  cudaStream_t copy_stream_ = nullptr;
  cudaEvent_t copied_[2] = {};
  mutable std::unique_ptr<Buffer> pinned_[2];

  mutable std::mutex checksum_mutex_;  // guards all below
  cudaStream_t checksum_stream_ = nullptr;
  mutable std::unique_ptr<Buffer> checksums_, host_checksums_;  // page ids, then results
};

absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(const CudaOptions& options) {
  const int device = options.device;
  int runtime = 0, driver = 0, count = 0;
  (void)cudaRuntimeGetVersion(&runtime);
  (void)cudaDriverGetVersion(&driver);
  const auto version = [](int v) { return absl::StrCat(v / 1000, ".", v % 1000 / 10); };
  if (driver == 0)
    return absl::FailedPreconditionError("cuda: no NVIDIA driver is installed on this machine; use --backend cpu");
  const cudaError_t counted = cudaGetDeviceCount(&count);
  if (counted == cudaErrorInsufficientDriver)
    return absl::FailedPreconditionError(absl::StrCat("cuda: the driver runs CUDA ", version(driver),
                                                      ", this build needs ", version(runtime),
                                                      "; update the driver or use --backend cpu"));
  if (counted == cudaErrorNoDevice || (counted == cudaSuccess && count == 0))
    return absl::FailedPreconditionError("cuda: this machine has no GPU that CUDA can use; use --backend cpu");
  SPLICE_CUDA_RETURN_IF_ERROR(counted, "looking for GPUs");
  if (device < 0 || device >= count)
    return absl::FailedPreconditionError(
        absl::StrCat("cuda: GPU ", device, " was asked for, this machine has ", count));
  cudaDeviceProp properties{};
  SPLICE_CUDA_RETURN_IF_ERROR(cudaGetDeviceProperties(&properties, device), "reading the GPU's properties");
  if (properties.major < 8)
    return absl::FailedPreconditionError(
        absl::StrFormat("cuda: GPU %d (%s) is sm_%d%d; this build runs on sm_80 and later; use --backend cpu", device,
                        properties.name, properties.major, properties.minor));
  auto backend = std::make_unique<CudaBackend>(options, properties);
  if (absl::Status s = backend->Init(); !s.ok()) return s;
  return std::unique_ptr<Backend>(std::move(backend));
}

}  // namespace
}  // namespace spl::kernels::cuda

extern "C" __attribute__((visibility("default"))) spl::kernels::Backend* splice_cuda_make_backend(
    const char* build, const spl::kernels::CudaOptions& options, char* error, size_t error_size, int* code) {
  absl::StatusOr<std::unique_ptr<spl::kernels::Backend>> backend =
      std::strcmp(build, spl::kernels::PluginBuild()) == 0
          ? spl::kernels::cuda::MakeBackend(options)
          : absl::FailedPreconditionError(absl::StrCat("cuda: the plug-in is of build '", spl::kernels::PluginBuild(),
                                                       "', the program of '", build, "'"));
  if (backend.ok()) return backend->release();
  *code = static_cast<int>(backend.status().code());
  const std::string message(backend.status().message().data(), backend.status().message().size());
  std::strncpy(error, message.c_str(), error_size - 1);
  return nullptr;
}
