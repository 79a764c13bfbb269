#include "services/base/fault_point.h"

#include <charconv>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "services/base/status.h"

namespace spl {
namespace {

struct Entry {
  std::atomic<bool> armed{false};
  FaultAction action;
  uint64_t num_hits = 0;
};

struct Table {
  std::mutex mutex;  // guards all below except Entry::armed
  std::condition_variable changed;
  std::map<std::string, Entry, std::less<>> entries;
  std::set<std::string, std::less<>> fired_events;
};

// Never destroyed: points are static objects of other files and threads may still pass them at exit.
Table& TheTable() {
  static Table* const table = new Table;
  return *table;
}

Entry& EntryOf(Table& table, std::string_view name) {
  return table.entries.try_emplace(std::string(name)).first->second;
}

absl::Status DelayUntil(Table& table, std::unique_lock<std::mutex>& lock, const std::string& event) {
  const bool fired =
      table.changed.wait_for(lock, std::chrono::seconds(60), [&] { return table.fired_events.count(event) != 0; });
  if (fired) return absl::OkStatus();
  return Errorf(absl::StatusCode::kDeadlineExceeded, "fault event '{}' was not fired within 60 s", event);
}

absl::StatusOr<absl::StatusCode> ParseCode(std::string_view name) {
  for (int code = 1; code <= 16; ++code) {
    const std::string known = absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
    if (known == name) return static_cast<absl::StatusCode>(code);
  }
  return InvalidArgument("'{}' is not a status code; write for example UNAVAILABLE", name);
}

}  // namespace

FaultPoint::FaultPoint(const char* name) : name_(name) {
  Table& table = TheTable();
  std::lock_guard lock(table.mutex);
  armed_ = &EntryOf(table, name_).armed;
}

FaultOutcome FaultPoint::HitArmed() const {
  Table& table = TheTable();
  std::unique_lock lock(table.mutex);
  Entry& entry = EntryOf(table, name_);
  const FaultAction action = entry.action;
  ++entry.num_hits;
  table.changed.notify_all();
  FaultOutcome outcome;
  if (action.only_hit != 0 && entry.num_hits != action.only_hit) return outcome;
  switch (action.kind) {
    case FaultKind::kNone:
      break;
    case FaultKind::kError:
      outcome.status = Errorf(action.code, "fault point {}", name_);
      break;
    case FaultKind::kDelayUntil:
      outcome.status = DelayUntil(table, lock, action.event);
      break;
    case FaultKind::kDelay:
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::milliseconds(action.delay_ms));
      break;
    case FaultKind::kDrop:
      outcome.drop = true;
      break;
    case FaultKind::kCrash:
      std::abort();
    case FaultKind::kKill:
      std::raise(SIGKILL);
      break;
    case FaultKind::kCorrupt:
      outcome.corrupt = true;
      break;
  }
  return outcome;
}

absl::Status ArmFault(std::string_view name, FaultAction action) {
  Table& table = TheTable();
  std::lock_guard lock(table.mutex);
  const auto found = table.entries.find(name);
  if (found == table.entries.end()) {
    return Errorf(absl::StatusCode::kNotFound, "no fault point '{}' in this program", name);
  }
  if (action.kind == FaultKind::kDelayUntil) table.fired_events.erase(action.event);
  found->second.action = std::move(action);
  found->second.num_hits = 0;
  found->second.armed.store(true);
  return absl::OkStatus();
}

void DisarmFault(std::string_view name) {
  Table& table = TheTable();
  std::lock_guard lock(table.mutex);
  const auto found = table.entries.find(name);
  if (found != table.entries.end()) found->second.armed.store(false);
}

void DisarmAllFaults() {
  Table& table = TheTable();
  std::lock_guard lock(table.mutex);
  for (auto& named : table.entries) {
    named.second.armed.store(false);
    if (named.second.action.kind == FaultKind::kDelayUntil) table.fired_events.insert(named.second.action.event);
  }
  table.changed.notify_all();
}

uint64_t FaultHits(std::string_view name) {
  Table& table = TheTable();
  std::lock_guard lock(table.mutex);
  const auto found = table.entries.find(name);
  return found == table.entries.end() ? 0 : found->second.num_hits;
}

void FireFaultEvent(std::string_view event) {
  Table& table = TheTable();
  std::lock_guard lock(table.mutex);
  table.fired_events.insert(std::string(event));
  table.changed.notify_all();
}

bool WaitForFaultHits(std::string_view name, uint64_t hits, int timeout_ms) {
  Table& table = TheTable();
  std::unique_lock lock(table.mutex);
  return table.changed.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                                [&] { return EntryOf(table, name).num_hits >= hits; });
}

absl::StatusOr<FaultAction> ParseFaultAction(std::string_view text) {
  FaultAction action;
  std::string_view body = text;
  if (const size_t at = body.rfind('@'); at != std::string_view::npos) {
    const std::string_view number = body.substr(at + 1);
    const auto [parsed_to, error] = std::from_chars(number.data(), number.data() + number.size(), action.only_hit);
    if (error != std::errc() || parsed_to != number.data() + number.size() || action.only_hit == 0) {
      return InvalidArgument("fault action '{}': '@{}' is not a hit number from 1 on", text, number);
    }
    body = body.substr(0, at);
  }
  std::string_view argument;
  if (const size_t open = body.find('('); open != std::string_view::npos && body.back() == ')') {
    argument = body.substr(open + 1, body.size() - open - 2);
    body = body.substr(0, open);
  }
  if (body == "error") {
    action.kind = FaultKind::kError;
    SPLICE_ASSIGN_OR_RETURN(action.code, ParseCode(argument));
  } else if (body == "delay_until" && !argument.empty()) {
    action.kind = FaultKind::kDelayUntil;
    action.event = std::string(argument);
  } else if (body == "delay") {
    action.kind = FaultKind::kDelay;
    const char* const end = argument.data() + argument.size();
    const auto [parsed_to, error] = std::from_chars(argument.data(), end, action.delay_ms);
    if (argument.empty() || error != std::errc() || parsed_to != end || action.delay_ms > 60'000)
      return InvalidArgument("fault action '{}': '{}' is not a number of milliseconds up to 60000", text, argument);
  } else if (body == "drop") {
    action.kind = FaultKind::kDrop;
  } else if (body == "crash") {
    action.kind = FaultKind::kCrash;
  } else if (body == "kill") {
    action.kind = FaultKind::kKill;
  } else if (body == "corrupt") {
    action.kind = FaultKind::kCorrupt;
  } else {
    return InvalidArgument(
        "fault action '{}' is not error(CODE), delay_until(EVENT), delay(MS), drop, crash, kill or corrupt, with @N or "
        "without",
        text);
  }
  return action;
}

absl::Status ArmFaultFromFlag(std::string_view text) {
  const char* const enabled = std::getenv(kEnableFaultsVariable);
  if (enabled == nullptr || std::string_view(enabled) != "1")
    return Errorf(absl::StatusCode::kFailedPrecondition,
                  "fault '{}': fault points are for tests, where {}=1 is in the environment", text,
                  kEnableFaultsVariable);
  const size_t equals = text.find('=');
  if (equals == std::string_view::npos) return InvalidArgument("fault '{}' is not NAME=ACTION", text);
  SPLICE_ASSIGN_OR_RETURN(FaultAction action, ParseFaultAction(text.substr(equals + 1)));
  return ArmFault(text.substr(0, equals), std::move(action));
}

}  // namespace spl
