// One structured line per event: time, level, event name, key=value pairs.
//
//   log::Info("kvstore.started", log::F("dir", dir), log::F("chunks", n));
//   2026-01-02T03:04:05.678Z info kvstore.started dir=/data chunks=12
//
// INFO lifecycle, WARNING degraded but serving, ERROR a request was lost, DEBUG per request or step. Nothing per token.
// All programs in one process share the logger; it writes whole lines to stderr.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <type_traits>

#include "absl/status/status.h"

namespace spl::log {

enum class Level { kDebug, kInfo, kWarning, kError, kOff };

// Takes "debug", "info", "warning", "error" or "off". InvalidArgument: another name.
absl::Status SetLevel(std::string_view name);
void SetLevel(Level level);
bool Enabled(Level level);

// Writes one line; `fields` are already in key=value form. Thread-safe.
void Write(Level level, std::string_view event, std::string_view fields);

// Appends `value`, quoted and escaped if it has spaces, quotes, '=' or control characters.
void AppendValue(fmt::memory_buffer& out, std::string_view value);

template <typename T>
struct Field {
  std::string_view key;
  const T& value;
};

template <typename T>
Field<T> F(std::string_view key, const T& value) {
  return {key, value};
}

template <typename T>
void AppendField(fmt::memory_buffer& out, const Field<T>& field) {
  out.push_back(' ');
  out.append(field.key.data(), field.key.data() + field.key.size());
  out.push_back('=');
  if constexpr (std::is_same_v<T, absl::Status>) {
    const std::string text = field.value.ToString();
    AppendValue(out, text);
  } else if constexpr (std::is_convertible_v<const T&, std::string_view>) {
    AppendValue(out, static_cast<std::string_view>(field.value));
  } else {
    fmt::format_to(fmt::appender(out), "{}", field.value);
  }
}

template <typename... T>
void Event(Level level, std::string_view event, const Field<T>&... fields) {
  if (!Enabled(level)) return;
  fmt::memory_buffer out;
  (AppendField(out, fields), ...);
  Write(level, event, std::string_view(out.data(), out.size()));
}

template <typename... T>
void Debug(std::string_view event, const Field<T>&... fields) {
  Event(Level::kDebug, event, fields...);
}
template <typename... T>
void Info(std::string_view event, const Field<T>&... fields) {
  Event(Level::kInfo, event, fields...);
}
template <typename... T>
void Warning(std::string_view event, const Field<T>&... fields) {
  Event(Level::kWarning, event, fields...);
}
template <typename... T>
void Error(std::string_view event, const Field<T>&... fields) {
  Event(Level::kError, event, fields...);
}

}  // namespace spl::log
