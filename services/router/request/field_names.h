// Names of a request's fields, for requests that were translated into a chat.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace spl::router {

// Says which field of the client's body became which field of the chat, so that an error names what the client wrote.
// Immutable once filled; any thread may read.
class FieldNames {
 public:
  // `chat` and all members below it come from the client's field `client` ("messages[2]" from "input[1]").
  void Add(std::string chat, std::string client) { names_[std::move(chat)] = std::move(client); }

  // The client's name of a path: the longest entry that it is, or lies below, is replaced. Others stay as they are.
  std::string Of(std::string_view path) const;
  // The same error with the client's name: in its field, and at the start of its message.
  absl::Status In(const absl::Status& status) const;

 private:
  std::map<std::string, std::string, std::less<>> names_;
};

}  // namespace spl::router
