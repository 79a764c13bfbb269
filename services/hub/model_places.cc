#include "services/hub/model_places.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "services/base/status.h"
#include "services/hub/pull_record.h"

namespace spl::hub {
namespace {

namespace fs = std::filesystem;

std::string Environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string CacheRoot(const ModelPlaces& places, const ModelName& name) {
  std::string folder = name.repository;
  folder.replace(folder.find('/'), 1, "--");
  return places.hf_cache + "/models--" + folder;
}

}  // namespace

ModelPlaces ModelPlaces::FromEnvironment() {
  const std::string home = Environment("HOME");
  std::string cache = Environment("XDG_CACHE_HOME");
  if (cache.empty() && !home.empty()) cache = home + "/.cache";
  ModelPlaces places{.models = Environment("SPLICE_MODELS"), .hf_cache = Environment("HF_HUB_CACHE")};
  if (places.models.empty()) places.models = cache.empty() ? "splice-models" : cache + "/splice/models";
  if (!places.hf_cache.empty()) return places;
  const std::string hf_home = Environment("HF_HOME");
  if (!hf_home.empty() || !cache.empty())
    places.hf_cache = (hf_home.empty() ? cache + "/huggingface" : hf_home) + "/hub";
  return places;
}

std::string ModelPlaces::FolderOf(const ModelName& name) const {
  std::string last = name.ToString();
  // A revision may have slashes: refs/pr/1.
  std::replace(last.begin() + static_cast<std::ptrdiff_t>(name.repository.size()), last.end(), '/', '~');
  return models + "/" + last;
}

absl::StatusOr<FoundModel> FindSnapshot(const ModelPlaces& places, const ModelName& name, const std::string& commit) {
  const std::string dir = CacheRoot(places, name) + "/snapshots/" + commit;
  if (places.hf_cache.empty() || commit.empty() || !CheckModelFolder(dir, FolderUse::kModel).ok())
    return Errorf(absl::StatusCode::kNotFound, "{}: no complete snapshot", dir);
  return FoundModel{dir, commit};
}

absl::StatusOr<FoundModel> FindPulled(const std::string& dir, const ModelName& name) {
  SPLICE_ASSIGN_OR_RETURN(const PullRecord record, ReadPullRecord(dir));
  if (record.name.ToString() != name.ToString() || !HasFilesOf(dir, record))
    return Errorf(absl::StatusCode::kNotFound, "{}: no complete {}", dir, name.ToString());
  return FoundModel{dir, record.commit};
}

absl::StatusOr<FoundModel> FindModel(const ModelPlaces& places, const ModelName& name) {
  const std::string own = places.FolderOf(name);
  if (auto pulled = FindPulled(own, name); pulled.ok()) return pulled;
  std::string commit = name.revision;  // the name of a commit is one itself
  std::ifstream(CacheRoot(places, name) + "/refs/" + name.revision) >> commit;
  if (const auto parsed = ParseModelName(name.repository + "@" + commit);
      parsed.ok() && commit.find('/') == std::string::npos) {
    if (auto found = FindSnapshot(places, name, commit); found.ok()) return found;
  }
  return Errorf(absl::StatusCode::kNotFound,
                "{} is not on this machine, neither in {} nor in Hugging Face's cache ({})", name.ToString(), own,
                places.hf_cache);
}

absl::StatusOr<std::string> LocalModelFolder(const ModelPlaces& places, const std::string& model, FolderUse use) {
  std::error_code error;
  if (fs::is_directory(model, error)) {
    SPLICE_RETURN_IF_ERROR(CheckModelFolder(model, use));
    return model;
  }
  const auto name = ParseModelName(model);
  if (!name.ok())
    return Errorf(absl::StatusCode::kNotFound,
                  "{}: no such folder; a model of a hub is called ORG/NAME (splice pull ORG/NAME fetches it)", model);
  const auto found = FindModel(places, *name);
  if (!found.ok())
    return Errorf(absl::StatusCode::kNotFound, "{}; run: splice pull {}", MessageOf(found.status()), model);
  return found->dir;
}

}  // namespace spl::hub
