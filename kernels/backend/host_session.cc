#include "kernels/backend/host_session.h"

#include <algorithm>
#include <thread>

namespace spl::kernels {

HostSession::HostSession(const SessionOptions& options) {
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  threads_ = std::make_unique<ThreadPool>(options.num_threads > 0 ? options.num_threads : cores);
  context_ = {.pool = threads_.get(), .isa = options.isa, .session = this};
}

}  // namespace spl::kernels
