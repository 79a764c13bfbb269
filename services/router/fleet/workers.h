// Channels to the workers, and calls on them that clean up after themselves.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "services/base/grpc_status.h"
#include "services/base/grpc_trace.h"
#include "services/base/tls.h"
#include "spl/v1/decode.grpc.pb.h"
#include "spl/v1/prefill.grpc.pb.h"

namespace spl::router {

// Makes the one HTTP/2 connection to a worker, for all requests; it reconnects within a second. `tls` as for
// MakePeerChannel.
std::shared_ptr<grpc::Channel> MakeWorkerChannel(const std::string& address, const PeerTls* tls);

// The version of the worker's program in its answer to GetInfo (wire::kProgramVersionKey), 64 bytes of it at most.
// Empty: it does not say it, or has not answered.
std::string ProgramVersionIn(const grpc::ClientContext& answered);

// The open calls, so that a stopping router can end them all before the objects that they report to are gone.
// Thread-safe.
class CallTracker {
 public:
  void Add(grpc::ClientContext* context);
  void Remove(grpc::ClientContext* context);  // call it after the call's last callback
  // Cancels all open calls and waits for their end; calls added later are cancelled at once. False: `timeout` passed
  // first.
  bool CancelAllAndWait(std::chrono::milliseconds timeout);

 private:
  std::mutex mutex_;  // guards the two below
  std::condition_variable empty_;
  std::set<grpc::ClientContext*> open_;
  bool closed_ = false;
};

// One worker process: a channel and a stub. Thread-safe.
template <typename Service>
class Worker {
 public:
  using Async = typename Service::Stub::async_interface;

  Worker(const std::string& address, const PeerTls* tls, std::shared_ptr<CallTracker> calls)
      : stub_(Service::NewStub(MakeWorkerChannel(address, tls))), calls_(std::move(calls)) {}
  Async* async() { return stub_->async(); }
  const std::shared_ptr<CallTracker>& calls() const { return calls_; }

 private:
  std::unique_ptr<typename Service::Stub> stub_;
  const std::shared_ptr<CallTracker> calls_;
};

class PrefillWorker : public Worker<v1::Prefill> {
 public:
  using Worker::Worker;
};
class DecodeWorker : public Worker<v1::Decode> {
 public:
  using Worker::Worker;
};

// The data of a unary call, kept alive by the completion callback until the call is over. `done` runs on a gRPC thread.
template <typename Request, typename Response>
struct UnaryCall {
  using Deadline = std::chrono::steady_clock::time_point;

  grpc::ClientContext context;
  Request request;
  Response response;

  // The overload of the stub's method that takes a callback (the other one takes a reactor).
  template <typename Async>
  using Method = void (Async::*)(grpc::ClientContext*, const Request*, Response*, std::function<void(grpc::Status)>);

  template <typename W, typename Done>
  static void Start(std::shared_ptr<UnaryCall> call, W& worker, Method<typename W::Async> method, Deadline deadline,
                    Done done) {
    call->context.set_deadline(ToGrpcDeadline(deadline));
    const std::shared_ptr<CallTracker> calls = worker.calls();
    calls->Add(&call->context);
    (worker.async()->*method)(&call->context, &call->request, &call->response,
                              [call, calls, done = std::move(done)](const grpc::Status& status) {
                                done(FromGrpcStatus(status), *call);
                                calls->Remove(&call->context);
                              });
  }
  void Cancel() { context.TryCancel(); }
};

// Reads Decode.Stream one chunk at a time. The next chunk is fetched only when ReadNext is called: a slow client holds
// back the decode worker instead of filling the router's memory. Owns itself until the call is over. Any thread may
// call.
class TokenStream : public grpc::ClientReadReactor<v1::StreamChunk> {
 public:
  // Both run on gRPC threads, one at a time. on_done runs exactly once, last.
  struct Callbacks {
    std::function<void(v1::StreamChunk)> on_chunk;
    std::function<void(absl::Status)> on_done;
  };

  static std::shared_ptr<TokenStream> Start(DecodeWorker& worker, v1::StreamRequest request,
                                            std::chrono::steady_clock::time_point deadline, const TraceContext& trace,
                                            Callbacks callbacks);
  void ReadNext();
  void Cancel();

 private:
  explicit TokenStream(Callbacks callbacks) : callbacks_(std::move(callbacks)) {}
  void OnReadDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

  grpc::ClientContext context_;
  v1::StreamRequest request_;
  v1::StreamChunk chunk_;
  Callbacks callbacks_;
  std::shared_ptr<CallTracker> calls_;
  std::shared_ptr<TokenStream> self_;
  std::mutex mutex_;   // guards idle_
  bool idle_ = false;  // a chunk was delivered and the next read has not been asked for
};

}  // namespace spl::router
