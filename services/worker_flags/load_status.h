// Says how far a worker program is with loading its model: in the log, and to probes.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "services/base/clock.h"
#include "services/base/http_endpoint.h"

namespace spl {

// Writes a line of log every ten seconds. Until Stop, /healthz and /readyz answer 503 with the percentage on the
// address that the worker's own endpoint takes afterwards: probes of a start that checks /healthz go on failing.
class LoadStatus {
 public:
  // `listen` is HOST:PORT. Empty, or port 0, which nobody can know yet: no endpoint. Unavailable: the address is taken.
  static absl::StatusOr<std::unique_ptr<LoadStatus>> Start(const std::string& listen,
                                                           const Clock& clock = Clock::Real());
  ~LoadStatus() { Stop(); }

  // For ModelOptions::on_progress. Valid while the LoadStatus lives.
  std::function<void(uint64_t done_bytes, uint64_t total_bytes)> Reporter();
  // Frees the address. Idempotent.
  void Stop();

 private:
  explicit LoadStatus(const Clock& clock) : clock_(clock), last_line_(clock.Now()) {}
  void Update(uint64_t done_bytes, uint64_t total_bytes);

  const Clock& clock_;
  SteadyTime last_line_;           // one call of Update at a time
  std::atomic<int> percent_ = -1;  // -1: nothing is known yet
  std::unique_ptr<HttpEndpoint> endpoint_;
};

}  // namespace spl
