#include "services/router/request/field_names.h"

#include <utility>

#include "services/router/request/api_error.h"

namespace spl::router {

std::string FieldNames::Of(std::string_view path) const {
  for (size_t end = path.size();;) {
    const auto found = names_.find(path.substr(0, end));
    if (found != names_.end()) return found->second + std::string(path.substr(end));
    end = path.find_last_of(".[", end == 0 ? 0 : end - 1);
    if (end == std::string_view::npos || end == 0) return std::string(path);
  }
}

absl::Status FieldNames::In(const absl::Status& status) const {
  const std::string field = ParamOf(status);
  const std::string name = Of(field);
  if (status.ok() || name == field) return status;
  std::string message = MessageOf(status);
  if (message.starts_with(field + ":") || message.starts_with(field + " ")) message.replace(0, field.size(), name);
  absl::Status renamed(status.code(), absl::string_view(message.data(), message.size()));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) { renamed.SetPayload(url, payload); });
  return SetParam(std::move(renamed), name);
}

}  // namespace spl::router
