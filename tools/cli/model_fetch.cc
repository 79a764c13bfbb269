#include "tools/cli/model_fetch.h"

#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>

#include "services/base/status.h"
#include "services/hub/model_places.h"
#include "tools/cli/interrupt.h"
#include "tools/cli/pull_display.h"

namespace spl::cli {
namespace {

bool IsOffline() {
  const char* const value = std::getenv("HF_HUB_OFFLINE");
  return value != nullptr && *value != '\0' && std::string(value) != "0";
}

}  // namespace

absl::StatusOr<FetchedModel> FetchModel(const hub::ModelName& name, const std::string& to, const HubFlags& flags,
                                        int parallel, bool quiet) {
  const hub::ModelPlaces places = hub::ModelPlaces::FromEnvironment();
  FetchedModel fetched{.dir = to.empty() ? places.FolderOf(name) : to, .pulled = {}};
  PullDisplay display = MakePullDisplay();
  hub::PullOptions options{.name = name, .dir = fetched.dir, .hub = {}, .parallel = parallel};
  SPLICE_ASSIGN_OR_RETURN(options.hub, flags.ToOptions());
  options.stopped = [] { return Interrupt::noted().load(); };
  if (!quiet) options.on_progress = [&](const hub::PullProgress& progress) { display.Update(progress); };
  if (to.empty())
    options.is_elsewhere = [&](const std::string& commit) {
      const auto found = hub::FindSnapshot(places, name, commit);
      if (found.ok()) fetched.dir = found->dir;
      return found.ok();
    };
  const Interrupt interrupt({SIGINT, SIGTERM});
  auto pulled = hub::PullModel(options);
  if (pulled.status().code() == absl::StatusCode::kCancelled)
    return absl::CancelledError("stopped; what has come is kept, and the same command goes on from there");
  if (!pulled.ok()) return pulled.status();
  fetched.pulled = *std::move(pulled);
  return fetched;
}

absl::Status ResolveModel(std::string& model, hub::FolderUse use) {
  std::error_code error;
  if (model.empty()) return absl::OkStatus();
  const hub::ModelPlaces places = hub::ModelPlaces::FromEnvironment();
  const auto name = hub::ParseModelName(model);
  if (std::filesystem::exists(model, error) || !name.ok()) {
    return hub::LocalModelFolder(places, model, use).status();
  }
  if (const auto found = hub::FindModel(places, *name); found.ok()) {
    model = found->dir;
    return absl::OkStatus();
  }
  if (IsOffline())
    return Errorf(absl::StatusCode::kNotFound, "{} is no folder and not on this machine, and HF_HUB_OFFLINE is set",
                  model);
  fmt::print(stderr, "{} is not on this machine: fetching it into {}\n", name->ToString(), places.FolderOf(*name));
  auto fetched = FetchModel(*name, "", HubFlags::FromEnvironment(), hub::PullOptions().parallel, /*quiet=*/false);
  if (!fetched.ok())
    return Annotate(fetched.status(), fmt::format("--model {} is no folder here, and the hub's model of that name "
                                                  "cannot be fetched",
                                                  model));
  model = fetched->dir;
  return absl::OkStatus();
}

}  // namespace spl::cli
