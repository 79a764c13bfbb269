#include "services/transport/ucx_runtime.h"

#include <arpa/inet.h>
#include <ucs/debug/log_def.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <fstream>
#include <mutex>

#include "services/base/log.h"
#include "services/base/status.h"
#include "services/transport/kv_transport.h"

namespace spl::transport {
namespace {

ucs_log_func_rc_t LogFromUcx(const char*, unsigned, const char* function, ucs_log_level_t level,
                             const ucs_log_component_config_t*, const char* message, va_list arguments) {
  if (level > UCS_LOG_LEVEL_INFO) return UCS_LOG_FUNC_RC_STOP;
  char text[1024];
  std::vsnprintf(text, sizeof(text), message, arguments);
  // UCX calls a vanished peer an error; here that is a Status of the channel, so its words are only a hint.
  const log::Level ours = level == UCS_LOG_LEVEL_FATAL ? log::Level::kError : log::Level::kDebug;
  log::Event(ours, "transport.ucx", log::F("function", function), log::F("message", text));
  return UCS_LOG_FUNC_RC_STOP;
}

std::string ReadLink(const char* path) {
  char target[256];
  const ssize_t length = readlink(path, target, sizeof(target));
  return length > 0 ? std::string(target, static_cast<size_t>(length)) : std::string();
}

}  // namespace

void InitUcxProcess() {
  static std::once_flag once;
  std::call_once(once, [] { ucs_log_push_handler(LogFromUcx); });
}

absl::Status StatusFromUcs(ucs_status_t status, const std::string& what) {
  absl::StatusCode code = absl::StatusCode::kInternal;
  switch (status) {
    case UCS_OK:
      return absl::OkStatus();
    case UCS_ERR_UNREACHABLE:
    case UCS_ERR_CONNECTION_RESET:
    case UCS_ERR_NOT_CONNECTED:
    case UCS_ERR_ENDPOINT_TIMEOUT:
    case UCS_ERR_TIMED_OUT:
    case UCS_ERR_REJECTED:
    case UCS_ERR_IO_ERROR:
    case UCS_ERR_CANCELED:
    case UCS_ERR_NO_DEVICE:
    case UCS_ERR_BUSY:
      code = absl::StatusCode::kUnavailable;
      break;
    case UCS_ERR_NO_MEMORY:
    case UCS_ERR_NO_RESOURCE:
    case UCS_ERR_EXCEEDS_LIMIT:
      code = absl::StatusCode::kResourceExhausted;
      break;
    case UCS_ERR_INVALID_PARAM:
    case UCS_ERR_INVALID_ADDR:
      code = absl::StatusCode::kInvalidArgument;
      break;
    default:
      break;
  }
  return Errorf(code, "{}: {}", what, ucs_status_string(status));
}

std::string AddressText(const sockaddr_storage& address) {
  char host[INET6_ADDRSTRLEN] = "";
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    inet_ntop(AF_INET, &v4.sin_addr, host, sizeof(host));
    return fmt::format("{}:{}", host, ntohs(v4.sin_port));
  }
  if (address.ss_family != AF_INET6) return "";
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
  inet_ntop(AF_INET6, &v6.sin6_addr, host, sizeof(host));
  return fmt::format("[{}]:{}", host, ntohs(v6.sin6_port));
}

std::string HostId() {
  static const std::string id = [] {
    std::ifstream boot("/proc/sys/kernel/random/boot_id");
    std::string boot_id;
    std::getline(boot, boot_id);
    const std::string ipc = ReadLink("/proc/self/ns/ipc");
    // Without a proof that memory can be shared, claim a host of our own.
    if (boot_id.empty() || ipc.empty()) return fmt::format("unknown/{}/{}", boot_id, getpid());
    return boot_id + "/" + ipc;
  }();
  return id;
}

}  // namespace spl::transport
