// --model ORG/NAME: the folder of a model that may have to be fetched first.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "services/hub/model_folder.h"
#include "services/hub/pull.h"
#include "tools/cli/hub_flags.h"

namespace spl::cli {

// Fetches a model, or finds that it is there; shows progress on stderr unless `quiet`. `to` empty: the model's folder
// of ModelPlaces, or a complete snapshot in Hugging Face's cache. SIGINT and SIGTERM end it with Cancelled; what came
// so far is kept.
struct FetchedModel {
  std::string dir;
  hub::PullResult pulled;
};
absl::StatusOr<FetchedModel> FetchModel(const hub::ModelName& name, const std::string& to, const HubFlags& flags,
                                        int parallel, bool quiet);

// Replaces a --model by its folder: an existing one stays as it is, a model of this machine is found without asking
// anybody, and another ORG/NAME is fetched, unless HF_HUB_OFFLINE is set to something other than 0. Empty stays empty.
// Call it before there are other threads. Errors say what to do, also about files that a folder lacks for `use`.
absl::Status ResolveModel(std::string& model, hub::FolderUse use = hub::FolderUse::kModel);

// How --model is described where ResolveModel is used.
inline constexpr char kModelHelp[] =
    "Hugging Face model folder, or ORG/NAME[@REVISION]: that model of the hub, fetched like splice pull if it is not "
    "on "
    "this machine";

}  // namespace spl::cli
