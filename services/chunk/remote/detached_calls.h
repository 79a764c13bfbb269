// Fire-and-forget gRPC calls.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>

#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>

namespace spl::chunk {

// Owns the calls until they have ended. The destructor cancels the remaining ones and waits for them. A context is
// never destroyed inside its own call's callback: it may hold the last reference to its channel, and gRPC 1.51 aborts
// when a channel ends on its own completion thread. Any thread may call.
class DetachedCalls {
 public:
  ~DetachedCalls() {
    std::unique_lock lock(mutex_);
    for (const auto& call : calls_) call->context.TryCancel();
    changed_.wait(lock, [this] {
      Reap();
      return calls_.empty();
    });
  }

  // `fill(context, request)` prepares the call, `start(context, request, response, done)` starts it.
  template <typename Request, typename Response, typename Fill, typename Start>
  void Run(const Fill& fill, const Start& start) {
    auto owned = std::make_unique<TypedCall<Request, Response>>();
    TypedCall<Request, Response>* const call = owned.get();
    fill(call->context, call->request);
    {
      std::lock_guard lock(mutex_);
      Reap();
      calls_.push_back(std::move(owned));
    }
    start(&call->context, &call->request, &call->response, [this, call](grpc::Status) {
      std::lock_guard lock(mutex_);
      call->ended = true;
      changed_.notify_all();
    });
  }

 private:
  struct Call {
    virtual ~Call() = default;
    grpc::ClientContext context;
    bool ended = false;  // guarded by mutex_
  };
  template <typename Request, typename Response>
  struct TypedCall : Call {
    Request request;
    Response response;
  };

  void Reap() {
    calls_.remove_if([](const std::unique_ptr<Call>& call) { return call->ended; });
  }

  std::mutex mutex_;  // guards calls_
  std::condition_variable changed_;
  std::list<std::unique_ptr<Call>> calls_;
};

}  // namespace spl::chunk
