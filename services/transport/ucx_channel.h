// One connection: a UCX endpoint, the peer's unpacked rkey, and either its memory mapped here or a queue of UCX
// operations.
#pragma once

#include <ucp/api/ucp.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "services/transport/copy_engine.h"
#include "services/transport/kv_transport.h"
#include "services/transport/rma_ops.h"
#include "services/transport/ucx_worker.h"

namespace spl::transport {

// The state behind a KvChannel, shared by its owner, the transport and running jobs. Methods marked [progress] run on
// the progress thread only; any thread may call the others.
//
// Life: Open → connected → (lost) → closing → closed. Every accepted job ends before closed. An operation that UCX or
// the copy engine has begun is waited for, never abandoned, because both access the caller's memory until it ends.
class UcxChannel : public std::enable_shared_from_this<UcxChannel> {
 public:
  UcxChannel(UcxWorker& worker, CopyEngine& copies, RemoteMemory remote);
  ~UcxChannel();

  // [progress] Starts to connect. kPeer reports a lost peer on every lane but never uses shared memory (UCX 1.13).
  // kNone uses shared memory; it serves only to map the peer's memory, never for a UCX data operation.
  void Open(const std::string& address_bytes, ucp_err_handling_mode_t mode);
  absl::Status WaitConnected(std::chrono::steady_clock::time_point deadline);

  absl::Status Put(std::vector<PutOp> ops, std::function<void(absl::Status)> done, LeaseEnd lease_end,
                   Copier copier = nullptr);
  absl::Status Get(std::vector<GetOp> ops, std::function<void(absl::Status)> done);
  absl::Status Flush(std::function<void(absl::Status)> done);
  absl::Status Close(std::chrono::nanoseconds timeout);
  // Starts to close; does not wait.
  void CloseSoon();
  // Gives up on the peer: network operations in flight end with an error instead of being waited for.
  void Abandon();
  bool WaitClosed(std::chrono::steady_clock::time_point deadline);

  bool mapped() const { return mapped_ != nullptr; }
  std::span<std::byte> mapped_memory() const { return {mapped_, mapped_ != nullptr ? remote_.size : 0}; }
  std::string carrier() const { return carrier_; }
  std::string local_address() const { return local_address_; }
  absl::Status status() const;
  bool closed() const;

 private:
  struct Job {
    std::vector<RmaOp> ops;
    bool is_get = false;
    LeaseEnd lease_end = kNoLease;
    size_t next_op = 0;
    size_t num_in_flight = 0;
    bool is_flush = false;
    bool all_posted = false;
    absl::Status status;
    std::function<void(absl::Status)> done;
    UcxChannel* channel = nullptr;
  };

  absl::Status Admit();
  struct Request {
    std::vector<RmaOp> ops;
    bool is_get = false;
    LeaseEnd lease_end = kNoLease;
    Copier copier;
  };
  absl::Status Start(Request request, const std::function<void(absl::Status)>& done);
  void Finish(const std::function<void(absl::Status)>& done, const absl::Status& status);  // [progress]
  void Enqueue(std::unique_ptr<Job> job);                                                  // [progress]
  void Pump();                                                                             // [progress]
  bool PostNext(Job& job);                                                                 // [progress]
  void OpDone(Job& job, ucs_status_t status);                                              // [progress]
  void Retire(Job& job);                                                                   // [progress]
  void DropQueued(const absl::Status& status);                                             // [progress]
  void Lose(const absl::Status& status);                                                   // [progress]
  void Connected(ucs_status_t status);                                                     // [progress]
  absl::Status MapOrChooseCarrier();                                                       // [progress]
  void AdvanceClose();                                                                     // [progress]
  void CloseEndpoint();                                                                    // [progress]
  void FinishClose();                                                                      // [progress]
  void MarkLost(const absl::Status& status);                                               // [progress]
  absl::Status Interruption() const;
  absl::Status MissLease();  // any thread
  // Ends queued jobs, and (by closing the endpoint) those in flight. Any thread may call. Runs as a task, because UCX
  // may report a loss from inside the very call by which Pump posts the first of queued_.
  void EndSoon();

  static void OnError(void* arg, ucp_ep_h ep, ucs_status_t status);
  static void OnOpDone(void* request, ucs_status_t status, void* user_data);
  static void OnConnected(void* request, ucs_status_t status, void* user_data);
  static void OnFlushedForClose(void* request, ucs_status_t status, void* user_data);
  static void OnClosed(void* request, ucs_status_t status, void* user_data);

  UcxWorker& worker_;
  CopyEngine& copies_;
  const RemoteMemory remote_;

  // Used by the progress thread only.
  ucp_ep_h ep_ = nullptr;
  ucp_err_handling_mode_t mode_ = UCP_ERR_HANDLING_MODE_NONE;
  ucp_rkey_h rkey_ = nullptr;
  std::deque<std::unique_ptr<Job>> queued_;   // not fully posted, in order
  std::vector<std::unique_ptr<Job>> posted_;  // fully posted, waiting for UCX
  size_t num_in_flight_ = 0;
  bool flushing_for_close_ = false;
  // Callbacks that UCX still owes with this object as argument: a forced close may end before a flush that it
  // cancelled.
  int num_calls_due_ = 0;
  std::shared_ptr<UcxChannel> alive_until_closed_;  // UCX holds a bare pointer to this object

  // Written before connected, read-only after.
  std::byte* mapped_ = nullptr;
  std::string carrier_, local_address_;

  mutable std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  absl::Status status_;
  bool connected_ = false;
  bool closing_ = false;
  bool closed_ = false;
  size_t num_pending_ = 0;  // accepted jobs whose done has not returned
};

}  // namespace spl::transport
