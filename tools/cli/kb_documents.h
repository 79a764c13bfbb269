// Documents of a knowledge base from files.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace spl::cli {

struct KbFile {
  std::string id;
  std::string text;
};

// Of a folder: every regular file below it, in the order of their paths, which (relative to the folder) are the ids;
// those whose names, or whose folders' names, begin with a dot are left out. Else of a file: one JSON object
// {"id": …, "text": …} a line; empty lines are skipped. NotFound or InvalidArgument names file and line.
absl::StatusOr<std::vector<KbFile>> ReadDocuments(const std::string& path);

// The file's content when there is such a file, else the text itself.
absl::StatusOr<std::string> ReadFileOrText(const std::string& file_or_text);

}  // namespace spl::cli
