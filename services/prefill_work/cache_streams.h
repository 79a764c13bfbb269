// Streams of cache events to the routers that watch: one gRPC stream each.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <mutex>
#include <set>

#include "services/base/periodic.h"
#include "services/prefill_work/cache_events.h"
#include "spl/v1/prefill.grpc.pb.h"

namespace spl::prefill {

// Borrows the events. Looks for new ones every 20 ms, so that a burst is one message. Thread-safe; call Close before
// destruction.
class CacheStreams {
 public:
  CacheStreams(const CacheEvents& events, uint64_t epoch);
  ~CacheStreams();

  grpc::ServerWriteReactor<v1::CacheEvents>* Open(const v1::WatchCacheRequest& request);
  // Ends all streams and refuses later ones.
  void Close();

 private:
  class Stream;
  void Remove(const std::shared_ptr<Stream>& stream);
  void Wake();

  const CacheEvents& events_;
  const uint64_t epoch_;
  std::mutex mutex_;  // guards the two below
  std::set<std::shared_ptr<Stream>> streams_;
  bool closed_ = false;
  std::unique_ptr<Periodic> waker_;
};

}  // namespace spl::prefill
