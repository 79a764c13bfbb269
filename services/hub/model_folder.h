// The files of a model's folder that Splice needs, and whether they are there.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace spl::hub {

inline constexpr char kConfigFile[] = "config.json";
inline constexpr char kWeightsFile[] = "model.safetensors";
inline constexpr char kIndexFile[] = "model.safetensors.index.json";  // there if the weights are in several files

// Files beside the weights that Splice reads; only config.json must be there.
const std::vector<std::string>& SideFiles();

// The files that an index names, without repetition, in order. InvalidArgument: `text` is not such an index, or a name
// in it is not a plain file name; `where` begins the message.
absl::StatusOr<std::vector<std::string>> WeightFilesOfIndex(const std::string& text, const std::string& where);

// True if `bytes`, the first of a file, are those of a Git LFS pointer: the file's content was not fetched.
bool IsLfsPointer(std::string_view bytes);

enum class FolderUse {
  kModel,     // weights are loaded from it
  kTextOnly,  // tokenizer and chat template, and config.json if it is there
};

// Looks for files that are missing and for Git LFS pointers in place of files. NotFound and FailedPrecondition name the
// first such file and the command that fetches it. Reads the index and the first bytes of each file; contents are not
// checked.
absl::Status CheckModelFolder(const std::string& dir, FolderUse use);

}  // namespace spl::hub
