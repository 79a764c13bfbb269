#include "services/router/telemetry/request_log.h"

#include <algorithm>
#include <utility>

namespace spl::router {
namespace {

double SecondsSince(std::chrono::steady_clock::time_point since) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
}

void Add(RequestTotals& totals, const RequestRecord& record) {
  ++totals.ended;
  if (record.status != "OK") {
    totals.failed += record.status.starts_with("CANCELLED") ? 0 : 1;
    return;
  }
  totals.prompt_tokens += record.prompt_tokens;
  if (!record.ran.has_value()) return;
  totals.prefix_tokens += record.ran->prefix_tokens;
  totals.stored_tokens += record.ran->stored_tokens;
  totals.aligned_tokens += record.ran->aligned_tokens;
  totals.recomputed_tokens += record.ran->recomputed_tokens;
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
  Add(totals_, record);
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

std::optional<RequestRecord> RequestLog::Find(const std::string& request_id) const {
  std::lock_guard lock(mutex_);
  for (auto it = active_.rbegin(); it != active_.rend(); ++it) {
    if (it->second.record.request_id != request_id) continue;
    RequestRecord found = it->second.record;
    found.seconds = SecondsSince(it->second.since);
    return found;
  }
  const auto ended =
      std::find_if(recent_.begin(), recent_.end(), [&](const RequestRecord& r) { return r.request_id == request_id; });
  return ended == recent_.end() ? std::nullopt : std::optional(*ended);
}

RequestTotals RequestLog::Totals() const {
  std::lock_guard lock(mutex_);
  return totals_;
}

}  // namespace spl::router
