// Names of models on a Hugging Face hub, and of the folders that hold them.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace spl::hub {

inline constexpr char kDefaultRevision[] = "main";

struct ModelName {
  std::string repository;                   // "ORG/NAME"
  std::string revision = kDefaultRevision;  // a branch, a tag or a commit

  // As people write it: without the default revision.
  std::string ToString() const;
};

// Parses "ORG/NAME" or "ORG/NAME@REVISION". InvalidArgument says what is wrong. Accepts no name that could leave a
// folder (".."), none with more than one slash in front of the revision.
absl::StatusOr<ModelName> ParseModelName(std::string_view text);

// The name under which a model folder is served: its last part, of a link the link's own. A snapshot in Hugging Face's
// cache (models--ORG--NAME/snapshots/COMMIT) is called NAME.
std::string FolderModelName(const std::string& dir);

}  // namespace spl::hub
