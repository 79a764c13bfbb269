#include "kernels/backend/cuda/collective_nccl.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "kernels/backend/cuda/cuda_session.h"
#include "kernels/cuda/cuda_status.h"

#ifndef SPLICE_HAVE_NCCL

namespace spl::kernels::cuda {

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> MakeNcclGroup(std::span<const int>) {
  return absl::UnimplementedError(
      "cuda: tensor parallelism needs NCCL, and this build was made without nccl.h; build it with NCCL's header in the "
      "compiler's path or in SPLICE_NCCL_INCLUDE_DIR");
}

}  // namespace spl::kernels::cuda

#else

#include <dlfcn.h>
#include <nccl.h>

#include "kernels/cuda/cuda_libraries.h"

namespace spl::kernels::cuda {
namespace {

struct Nccl {
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRank) init_rank = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclAllReduce) all_reduce = nullptr;
  decltype(&ncclCommAbort) abort = nullptr;
  decltype(&ncclCommDestroy) destroy = nullptr;
  decltype(&ncclGetErrorString) error_string = nullptr;
};

absl::StatusOr<Nccl> LoadNccl() {
  // A program that fails in NVLink multicast can put all GPUs of its host out of service; the few ranks of a worker do
  // without. Set before the library reads its environment.
  (void)setenv("NCCL_NVLS_ENABLE", "0", 1);
  // NCCL's reports (NCCL_DEBUG) must not go to stdout, where programs say that they are ready.
  (void)setenv("NCCL_DEBUG_FILE", "/dev/stderr", 0);
  auto library = OpenCudaLibrary("libnccl.so.2", "nccl");
  if (!library.ok())
    return absl::NotFoundError(absl::StrCat("cuda: tensor parallelism needs NCCL: ", library.status().message()));
  Nccl nccl;
  absl::Status missing;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(*library, name));
    if (function == nullptr) missing = absl::NotFoundError(absl::StrCat("cuda: libnccl.so.2 has no ", name));
  };
  find(nccl.get_unique_id, "ncclGetUniqueId");
  find(nccl.init_rank, "ncclCommInitRank");
  find(nccl.group_start, "ncclGroupStart");
  find(nccl.group_end, "ncclGroupEnd");
  find(nccl.all_reduce, "ncclAllReduce");
  find(nccl.abort, "ncclCommAbort");
  find(nccl.destroy, "ncclCommDestroy");
  find(nccl.error_string, "ncclGetErrorString");
  if (!missing.ok()) return missing;
  return nccl;
}

// All communicators of a group: one rank's failure must reach the kernels in which the others wait.
struct NcclGroup {
  explicit NcclGroup(const Nccl& nccl) : nccl(nccl) {}
  const Nccl nccl;
  std::mutex mutex;  // guards all below
  std::vector<ncclComm_t> comms;
  absl::Status aborted;

  void Abort(const absl::Status& why) {
    std::lock_guard lock(mutex);
    if (!aborted.ok()) return;
    aborted = why.ok() ? absl::AbortedError("cuda: the group was aborted") : why;
    // Ends the kernels that wait on a GPU, and frees the communicator.
    for (ncclComm_t& comm : comms) {
      if (comm != nullptr) (void)nccl.abort(comm);
      comm = nullptr;
    }
  }
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::shared_ptr<NcclGroup> group, int rank) : group_(std::move(group)), rank_(rank) {}
  ~NcclCommunicator() override {
    std::lock_guard lock(group_->mutex);
    ncclComm_t& comm = group_->comms[static_cast<size_t>(rank_)];
    if (comm != nullptr) (void)group_->nccl.destroy(comm);
    comm = nullptr;
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(group_->comms.size()); }

  absl::Status AllReduceSum(const KernelContext& ctx, float* data, int64_t count) override {
    ncclComm_t comm = nullptr;
    {
      std::lock_guard lock(group_->mutex);
      if (!group_->aborted.ok()) return group_->aborted;
      comm = group_->comms[static_cast<size_t>(rank_)];
    }
    const ncclResult_t result = group_->nccl.all_reduce(data, data, static_cast<size_t>(count), ncclFloat32, ncclSum,
                                                        comm, CudaSession::Of(ctx).stream());
    if (result == ncclSuccess) return absl::OkStatus();
    return absl::InternalError(
        absl::StrCat("cuda: NCCL's all-reduce on rank ", rank_, ": ", group_->nccl.error_string(result)));
  }

  void Abort(const absl::Status& why) override { group_->Abort(why); }

 private:
  const std::shared_ptr<NcclGroup> group_;
  const int rank_;
};

}  // namespace

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> MakeNcclGroup(std::span<const int> devices) {
  for (size_t i = 0; i < devices.size(); ++i) {
    if (std::find(devices.begin(), devices.begin() + static_cast<std::ptrdiff_t>(i), devices[i]) !=
        devices.begin() + static_cast<std::ptrdiff_t>(i))
      return absl::InvalidArgumentError(absl::StrCat("cuda: GPU ", devices[i], " is in the group twice"));
  }
  static std::mutex loading;
  absl::StatusOr<Nccl> nccl = absl::UnknownError("");
  {
    std::lock_guard lock(loading);
    nccl = LoadNccl();
  }
  if (!nccl.ok()) return nccl.status();
  auto group = std::make_shared<NcclGroup>(*nccl);
  group->comms.resize(devices.size());
  ncclUniqueId id;
  const auto failed = [&](ncclResult_t result, const char* what) {
    return absl::FailedPreconditionError(absl::StrCat("cuda: NCCL could not connect ", devices.size(), " GPUs: ", what,
                                                      ": ", nccl->error_string(result)));
  };
  if (const ncclResult_t result = nccl->get_unique_id(&id); result != ncclSuccess) return failed(result, "an id");
  // All ranks of the group at once: each waits for the others.
  if (const ncclResult_t result = nccl->group_start(); result != ncclSuccess) return failed(result, "a group");
  ncclResult_t started = ncclSuccess;
  for (size_t i = 0; i < devices.size() && started == ncclSuccess; ++i) {
    started = cudaSetDevice(devices[i]) != cudaSuccess
                  ? ncclUnhandledCudaError
                  : nccl->init_rank(&group->comms[i], static_cast<int>(devices.size()), id, static_cast<int>(i));
  }
  const ncclResult_t ended = nccl->group_end();
  if (started != ncclSuccess) return failed(started, "a rank");
  if (ended != ncclSuccess) return failed(ended, "the ranks");
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (size_t i = 0; i < devices.size(); ++i)
    ranks.push_back(std::make_unique<NcclCommunicator>(group, static_cast<int>(i)));
  return ranks;
}

}  // namespace spl::kernels::cuda

#endif
