// Errors about one field of a document: a request body or a file of a model folder.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace spl {

// Payloads of a status: the path of the field, and a code for programs.
inline constexpr char kFieldPayload[] = "spl.v1/param";
inline constexpr char kErrorCodePayload[] = "spl.v1/error-code";

// InvalidArgument "PATH: MESSAGE" with PATH as a payload. A "." or ": " at the end of `path` is dropped.
absl::Status FieldError(std::string_view path, std::string_view message);

}  // namespace spl
