#include "services/worker_flags/load_status.h"

#include <fmt/format.h>

#include "services/base/address.h"
#include "services/base/byte_size.h"
#include "services/base/log.h"
#include "services/base/status.h"

namespace spl {
namespace {

constexpr std::chrono::seconds kLinePeriod{10};

}  // namespace

absl::StatusOr<std::unique_ptr<LoadStatus>> LoadStatus::Start(const std::string& listen, const Clock& clock) {
  auto status = std::unique_ptr<LoadStatus>(new LoadStatus(clock));
  if (listen.empty()) return status;
  SPLICE_ASSIGN_OR_RETURN(const HostPort address, ParseHostPort(listen));
  if (address.port == 0) return status;
  const auto answer = [s = status.get()] {
    const int percent = s->percent_.load();
    return HttpReply{.status = 503,
                     .body = percent < 0 ? "loading the model\n" : fmt::format("loading the model: {} %\n", percent)};
  };
  SPLICE_ASSIGN_OR_RETURN(status->endpoint_, HttpEndpoint::Start(listen, {{"/healthz", answer}, {"/readyz", answer}}));
  return status;
}

std::function<void(uint64_t done_bytes, uint64_t total_bytes)> LoadStatus::Reporter() {
  return [this](uint64_t done_bytes, uint64_t total_bytes) { Update(done_bytes, total_bytes); };
}

void LoadStatus::Update(uint64_t done_bytes, uint64_t total_bytes) {
  const int percent = total_bytes == 0 ? 100 : static_cast<int>(done_bytes * 100 / total_bytes);
  percent_.store(percent);
  if (clock_.Now() - last_line_ < kLinePeriod) return;
  last_line_ = clock_.Now();
  log::Info("model.loading", log::F("percent", percent), log::F("done", FormatByteSize(done_bytes)),
            log::F("total", FormatByteSize(total_bytes)));
}

void LoadStatus::Stop() {
  if (endpoint_ != nullptr) endpoint_->Stop();
}

}  // namespace spl
