#include <algorithm>
#include <set>

#include "services/base/status.h"
#include "services/hub/model_folder.h"
#include "services/hub/pull.h"

namespace spl::hub {
namespace {

const HubFile* Find(const HubListing& listing, const std::string& name) {
  const auto found =
      std::find_if(listing.files.begin(), listing.files.end(), [&](const HubFile& file) { return file.name == name; });
  return found == listing.files.end() ? nullptr : &*found;
}

// Why a repository without model.safetensors cannot be run.
std::string WeightsInstead(const HubListing& listing) {
  const auto has = [&](const char* ending) {
    return std::any_of(listing.files.begin(), listing.files.end(),
                       [&](const HubFile& file) { return file.name.ends_with(ending); });
  };
  if (has(".gguf")) return "its weights are GGUF files; take the repository that they were made from";
  if (has(".safetensors"))
    return "its safetensors files are none of model.safetensors and model.safetensors.index.json (an adapter, or "
           "another layout)";
  if (has(".bin") || has(".pt") || has(".pth"))
    return "its weights are PyTorch files (.bin, .pt, .pth), which may run code when they are read; convert them to "
           "safetensors, or take a repository that has";
  return "it has no weights at all";
}

}  // namespace

absl::StatusOr<std::vector<HubFile>> NeededFiles(const ModelName& name, const HubListing& listing,
                                                 const std::string& index) {
  std::vector<HubFile> files;
  const auto refuse = [&](const std::string& why) {
    return Errorf(absl::StatusCode::kFailedPrecondition, "{} cannot be run by Splice: {}", name.ToString(), why);
  };
  std::vector<std::string> weights = {kWeightsFile};
  if (!index.empty()) {
    SPLICE_ASSIGN_OR_RETURN(weights, WeightFilesOfIndex(index, name.ToString() + "/" + kIndexFile));
    weights.insert(weights.begin(), kIndexFile);
  } else if (Find(listing, kWeightsFile) == nullptr) {
    return refuse(WeightsInstead(listing));
  }
  if (Find(listing, kConfigFile) == nullptr) return refuse("it has no config.json");
  for (const std::string& file : SideFiles()) {
    if (const HubFile* found = Find(listing, file); found != nullptr) files.push_back(*found);
  }
  for (const std::string& file : weights) {
    const HubFile* const found = Find(listing, file);
    if (found == nullptr) return refuse(file + " is named by its index and is not there");
    files.push_back(*found);
  }
  return files;
}

}  // namespace spl::hub
