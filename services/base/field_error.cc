#include "services/base/field_error.h"

#include "absl/strings/cord.h"
#include "services/base/status.h"

namespace spl {

absl::Status FieldError(std::string_view path, std::string_view message) {
  if (path.ends_with(": ")) path.remove_suffix(2);
  if (path.ends_with('.')) path.remove_suffix(1);
  absl::Status status = InvalidArgument("{}: {}", path, message);
  status.SetPayload(kFieldPayload, absl::Cord(std::string(path)));
  return status;
}

}  // namespace spl
