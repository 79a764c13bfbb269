// Places of models on this machine: Splice's own folder, and Hugging Face's cache.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "services/hub/model_folder.h"
#include "services/hub/model_name.h"

namespace spl::hub {

struct ModelPlaces {
  std::string models;    // ORG/NAME below it is a model's folder; with a revision ORG/NAME@REVISION
  std::string hf_cache;  // folder with models--ORG--NAME; empty: not looked at

  // SPLICE_MODELS, otherwise XDG_CACHE_HOME/splice/models, otherwise ~/.cache/splice/models. HF_HUB_CACHE, otherwise
  // HF_HOME/hub, otherwise ~/.cache/huggingface/hub. Without a home the models are in ./splice-models.
  static ModelPlaces FromEnvironment();

  // The folder that a pull of `name` fills.
  std::string FolderOf(const ModelName& name) const;
};

struct FoundModel {
  std::string dir;
  std::string commit;
};

// A complete copy on this machine; uses no network. NotFound: neither place has one.
absl::StatusOr<FoundModel> FindModel(const ModelPlaces& places, const ModelName& name);
// The same in one folder that a pull of that name and revision has filled.
absl::StatusOr<FoundModel> FindPulled(const std::string& dir, const ModelName& name);
// The complete snapshot of a commit in Hugging Face's cache. NotFound: there is none.
absl::StatusOr<FoundModel> FindSnapshot(const ModelPlaces& places, const ModelName& name, const std::string& commit);

// The folder that --model means: an existing folder itself, or a copy of ORG/NAME on this machine. NotFound and
// FailedPrecondition say which file is missing, and the command to run.
absl::StatusOr<std::string> LocalModelFolder(const ModelPlaces& places, const std::string& model, FolderUse use);

}  // namespace spl::hub
