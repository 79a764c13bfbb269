// A router over fake workers, ready to serve.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "services/router/router_server.h"
#include "tests/support/fake_workers.h"

namespace spl::testing {

inline constexpr char kTinyModel[] = "models/splice-tiny";

// Workers p0…, d0…; start the router with StartRouter.
struct FakeCluster {
  FakeFabric fabric;
  std::vector<std::unique_ptr<FakePrefill>> prefill;
  std::vector<std::unique_ptr<FakeDecode>> decode;
  router::RouterOptions options;
  std::unique_ptr<router::RouterServer> router;

  // `store`: chunk stores of the prefill workers and the router. `replays`: false for decode workers from before that.
  FakeCluster(int num_prefill, int num_decode, const std::string& store = "", bool replays = true) {
    for (int i = 0; i < num_prefill; ++i) {
      prefill.push_back(std::make_unique<FakePrefill>(
          fabric, FakePrefill::Options{.worker_id = "p" + std::to_string(i), .store = store}));
    }
    for (int i = 0; i < num_decode; ++i) {
      decode.push_back(std::make_unique<FakeDecode>(
          fabric, FakeDecode::Options{.worker_id = "d" + std::to_string(i), .replays = replays}));
    }
    options.model_dir = kTinyModel;
    options.knowledge_bases.store = store;
    options.http.listen = "127.0.0.1:0";
    options.grpc_listen = "127.0.0.1:0";
    options.dispatch.fleet.poll_interval = std::chrono::milliseconds(20);
    options.dispatch.retry_backoff = std::chrono::milliseconds(20);
    options.drain_timeout = std::chrono::milliseconds(2'000);
  }
  ~FakeCluster() {
    if (router != nullptr) router->Stop();
  }

  // Returns once every pair is connected; aborts the test program when that does not come about.
  void StartRouter() {
    for (const auto& p : prefill) options.dispatch.fleet.prefill.push_back(p->address());
    for (const auto& d : decode) options.dispatch.fleet.decode.push_back(d->address());
    auto started = router::RouterServer::Start(options);
    if (!started.ok()) {
      std::fprintf(stderr, "%s\n", started.status().ToString().c_str());
      std::abort();
    }
    router = std::move(*started);
    WaitForPairs(prefill.size(), decode.size());
  }

  void WaitForPairs(size_t num_prefill, size_t num_decode) {
    const auto deadline = std::chrono::steady_clock::now() + kLongWait;
    while (true) {
      const auto fleet = router->dispatcher().fleet().snapshot();
      size_t pairs = 0;
      for (const auto& p : fleet->prefill) pairs += p.peers.size();
      const bool complete = fleet->prefill.size() == num_prefill && fleet->decode.size() == num_decode;
      if (complete && pairs == num_prefill * num_decode) return;
      if (std::chrono::steady_clock::now() > deadline) std::abort();
      std::this_thread::yield();
    }
  }

  std::string http() const { return router->http_address(); }
};

}  // namespace spl::testing
