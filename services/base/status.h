// Two macros for functions that return absl::Status or absl::StatusOr, and helpers to build messages from std types
// (the packaged Abseil does not take std::string_view).
#pragma once

#include <fmt/format.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define SPLICE_RETURN_IF_ERROR(expr)                                                       \
  do {                                                                                     \
    if (absl::Status splice_status_ = (expr); !splice_status_.ok()) return splice_status_; \
  } while (false)

#define SPLICE_CONCAT_INNER_(a, b) a##b
#define SPLICE_CONCAT_(a, b) SPLICE_CONCAT_INNER_(a, b)
#define SPLICE_ASSIGN_OR_RETURN_IMPL_(tmp, lhs, expr) \
  auto tmp = (expr);                                  \
  if (!tmp.ok()) return std::move(tmp).status();      \
  lhs = std::move(tmp).value()
#define SPLICE_ASSIGN_OR_RETURN(lhs, expr) \
  SPLICE_ASSIGN_OR_RETURN_IMPL_(SPLICE_CONCAT_(splice_or_, __LINE__), lhs, expr)

namespace spl {

// absl::Status with a fmt-formatted message: Errorf(absl::StatusCode::kInvalidArgument, "max_tokens is {}", n).
template <typename... Args>
absl::Status Errorf(absl::StatusCode code, fmt::format_string<Args...> format, Args&&... args) {
  const std::string message = fmt::format(format, std::forward<Args>(args)...);
  return absl::Status(code, absl::string_view(message.data(), message.size()));
}

template <typename... Args>
absl::Status InvalidArgument(fmt::format_string<Args...> format, Args&&... args) {
  return Errorf(absl::StatusCode::kInvalidArgument, format, std::forward<Args>(args)...);
}

// The status message as std::string (absl::string_view does not convert by itself).
inline std::string MessageOf(const absl::Status& status) {
  return std::string(status.message().data(), status.message().size());
}

// `status` with "context: " in front of its message; OK stays OK.
inline absl::Status Annotate(const absl::Status& status, const std::string& context) {
  if (status.ok()) return status;
  const std::string message = context + ": " + MessageOf(status);
  return absl::Status(status.code(), absl::string_view(message.data(), message.size()));
}

}  // namespace spl
