#include "services/base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>

#include "services/base/status.h"

namespace spl::log {
namespace {

spdlog::level::level_enum ToSpdlog(Level level) {
  switch (level) {
    case Level::kDebug:
      return spdlog::level::debug;
    case Level::kInfo:
      return spdlog::level::info;
    case Level::kWarning:
      return spdlog::level::warn;
    case Level::kError:
      return spdlog::level::err;
    case Level::kOff:
      break;
  }
  return spdlog::level::off;
}

// Never destroyed: threads may log while static objects die.
spdlog::logger& Logger() {
  static spdlog::logger* const logger = [] {
    auto made = std::make_unique<spdlog::logger>("splice", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("%Y-%m-%dT%H:%M:%S.%eZ %l %v", spdlog::pattern_time_type::utc);
    made->flush_on(spdlog::level::debug);
    return made.release();
  }();
  return *logger;
}

bool NeedsQuotes(std::string_view value) {
  if (value.empty()) return true;
  for (const char c : value) {
    if (c <= ' ' || c == '"' || c == '=' || c == '\\' || c == 0x7f) return true;
  }
  return false;
}

}  // namespace

absl::Status SetLevel(std::string_view name) {
  constexpr std::string_view kNames[] = {"debug", "info", "warning", "error", "off"};
  for (int i = 0; i < 5; ++i) {
    if (name == kNames[i]) {
      SetLevel(static_cast<Level>(i));
      return absl::OkStatus();
    }
  }
  return InvalidArgument("log level '{}' is not one of debug, info, warning, error, off", name);
}

void SetLevel(Level level) { Logger().set_level(ToSpdlog(level)); }

bool Enabled(Level level) { return Logger().should_log(ToSpdlog(level)); }

void Write(Level level, std::string_view event, std::string_view fields) {
  Logger().log(ToSpdlog(level), "{}{}", event, fields);
}

void AppendValue(fmt::memory_buffer& out, std::string_view value) {
  if (!NeedsQuotes(value)) {
    out.append(value.data(), value.data() + value.size());
    return;
  }
  out.push_back('"');
  for (const char c : value) {
    if (c == '"' || c == '\\') {
      out.push_back('\\');
      out.push_back(c);
    } else if (c == '\n') {
      fmt::format_to(fmt::appender(out), "\\n");
    } else if (static_cast<unsigned char>(c) < ' ' || c == 0x7f) {
      fmt::format_to(fmt::appender(out), "\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      out.push_back(c);
    }
  }
  out.push_back('"');
}

}  // namespace spl::log
