// Reads one worker's Prefill.WatchCache into the router's view.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "services/router/fleet/cache_view.h"
#include "services/router/fleet/workers.h"

namespace spl::router {

// Owns itself until the call ends: when it breaks, when the router stops (CallTracker), or at a gap.
class CacheWatch : public grpc::ClientReadReactor<v1::CacheEvents> {
 public:
  // `on_end` runs once, on a gRPC thread.
  static void Start(PrefillWorker& worker, std::shared_ptr<CacheView> view, std::string worker_id, uint64_t epoch,
                    std::function<void(const absl::Status&)> on_end);

 private:
  CacheWatch(std::shared_ptr<CacheView> view, std::string worker_id, uint64_t epoch,
             std::function<void(const absl::Status&)> on_end);
  void OnReadDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;
  // False: the message does not follow the last one.
  bool Take();

  const std::shared_ptr<CacheView> view_;
  const std::string worker_id_;
  const uint64_t epoch_;
  std::function<void(const absl::Status&)> on_end_;
  std::shared_ptr<CallTracker> calls_;
  grpc::ClientContext context_;
  v1::WatchCacheRequest request_;
  v1::CacheEvents message_;
};

}  // namespace spl::router
