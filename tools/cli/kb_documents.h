// Reads documents of a knowledge base from files.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace spl::cli {

struct KbFile {
  std::string id;
  std::string text;
};

// From a folder: every regular file below it, ordered by path; the path relative to the folder is the id. Skips files
// and folders whose names begin with a dot. From a file: one JSON object {"id": …, "text": …} per line; skips empty
// lines. NotFound and InvalidArgument name file and line.
absl::StatusOr<std::vector<KbFile>> ReadDocuments(const std::string& path);

// The content of the file with this name; if there is none, the text itself.
absl::StatusOr<std::string> ReadFileOrText(const std::string& file_or_text);

}  // namespace spl::cli
