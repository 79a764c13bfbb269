#include "services/router/telemetry/request_log.h"

#include <utility>

namespace spl::router {
namespace {

double SecondsSince(std::chrono::steady_clock::time_point since) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
}

}  // namespace

void RequestLog::Begin(uint64_t id, RequestRecord record) {
  record.started_unix_ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  std::lock_guard lock(mutex_);
  active_[id] = {std::move(record), Clock::now()};
}

void RequestLog::Update(uint64_t id, const std::function<void(RequestRecord&)>& change) {
  std::lock_guard lock(mutex_);
  if (const auto found = active_.find(id); found != active_.end()) change(found->second.record);
}

void RequestLog::End(uint64_t id, const std::function<void(RequestRecord&)>& change) {
  std::lock_guard lock(mutex_);
  const auto found = active_.find(id);
  if (found == active_.end()) return;
  RequestRecord& record = found->second.record;
  record.seconds = SecondsSince(found->second.since);
  record.stage = "done";
  change(record);
  recent_.push_front(std::move(record));
  if (recent_.size() > max_recent_) recent_.pop_back();
  active_.erase(found);
}

std::vector<RequestRecord> RequestLog::Active() const {
  std::vector<RequestRecord> out;
  std::lock_guard lock(mutex_);
  for (const auto& [id, entry] : active_) {
    out.push_back(entry.record);
    out.back().seconds = SecondsSince(entry.since);
  }
  return out;
}

std::vector<RequestRecord> RequestLog::Recent() const {
  std::lock_guard lock(mutex_);
  return {recent_.begin(), recent_.end()};
}

}  // namespace spl::router
