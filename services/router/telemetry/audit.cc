#include "services/router/telemetry/audit.h"

#include <string>

#include "services/base/log.h"
#include "services/base/status.h"

namespace spl::router {

void WriteAudit(const AuditEntry& entry) {
  const std::string code = absl::StatusCodeToString(entry.result.code());
  const std::string message = MessageOf(entry.result);
  const std::string_view caller = entry.caller.empty() ? std::string_view("unknown") : entry.caller;
  if (entry.result.ok()) {
    log::Info("router.audit", log::F("caller", caller), log::F("api", entry.api), log::F("call", entry.call),
              log::F("target", entry.target), log::F("result", code));
  } else {
    log::Info("router.audit", log::F("caller", caller), log::F("api", entry.api), log::F("call", entry.call),
              log::F("target", entry.target), log::F("result", code), log::F("message", message));
  }
}

}  // namespace spl::router
