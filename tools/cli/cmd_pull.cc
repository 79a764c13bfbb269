// splice pull: fetches a model from a Hugging Face hub.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "services/base/byte_size.h"
#include "services/base/status.h"
#include "services/hub/model_places.h"
#include "tools/cli/command.h"
#include "tools/cli/hub_flags.h"
#include "tools/cli/model_fetch.h"
#include "tools/cli/pull_display.h"

namespace spl::cli {
namespace {

using nlohmann::json;

struct Flags {
  HubFlags hub;
  std::string model, to;
  int parallel = hub::PullOptions().parallel;
  bool if_missing = false;
  bool json = false;
};

json ToJson(const hub::ModelName& name, const FetchedModel& model) {
  json out = {{"model", name.repository},
              {"revision", name.revision},
              {"commit", model.pulled.commit},
              {"dir", model.dir},
              {"fetched_bytes", model.pulled.fetched_bytes},
              {"seconds", model.pulled.seconds},
              {"files", json::array()}};
  for (const hub::HubFile& file : model.pulled.files)
    out["files"].push_back({{"name", file.name}, {"size", file.size}, {"digest", file.digest.ToString()}});
  return out;
}

absl::StatusOr<FetchedModel> FindOrFetch(const hub::ModelName& name, const Flags& flags) {
  if (flags.if_missing) {
    hub::ModelPlaces places = hub::ModelPlaces::FromEnvironment();
    const auto found = flags.to.empty() ? hub::FindModel(places, name) : hub::FindPulled(flags.to, name);
    if (found.ok()) return FetchedModel{.dir = found->dir, .pulled = {.commit = found->commit}};
  }
  return FetchModel(name, flags.to, flags.hub, flags.parallel, /*quiet=*/flags.json);
}

absl::Status RunPull(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const hub::ModelName name, hub::ParseModelName(flags.model));
  SPLICE_ASSIGN_OR_RETURN(const FetchedModel model, FindOrFetch(name, flags));
  if (flags.json) {
    fmt::print("{}\n", ToJson(name, model).dump());
    return absl::OkStatus();
  }
  const hub::PullResult& pulled = model.pulled;
  if (pulled.fetched_bytes == 0)
    fmt::print("{} is up to date, commit {}: {}\n", name.ToString(), pulled.commit.substr(0, 12), model.dir);
  else
    fmt::print("{} is ready, commit {}, {} in {}: {}\n", name.ToString(), pulled.commit.substr(0, 12),
               FormatByteSize(pulled.fetched_bytes), FormatSeconds(pulled.seconds), model.dir);
  fmt::print("next: splice serve --model {}\n", flags.to.empty() ? name.ToString() : flags.to);
  return absl::OkStatus();
}

}  // namespace

Command MakePullCommand(CLI::App& root) {
  auto flags = std::make_shared<Flags>();
  CLI::App& app = *root.add_subcommand("pull", "Fetch a model from a Hugging Face hub");
  app.footer(
      "Examples:\n"
      "  splice pull Qwen/Qwen3-8B && splice serve --model Qwen/Qwen3-8B\n"
      "  HF_TOKEN=hf_... splice pull meta-llama/Llama-3.1-8B-Instruct\n"
      "  splice pull ORG/NAME@v1.0 --to /models/model --hub https://mirror.example.com\n\n"
      "Fetches config.json, tokenizer, chat template and safetensors; other formats of the same weights are left "
      "where\n"
      "they are. Models go to $SPLICE_MODELS/ORG/NAME (default: ~/.cache/splice/models). A model that Hugging Face's\n"
      "own cache has is used from there. Ctrl-C and a lost connection lose nothing: the same command goes on where it\n"
      "ended. Every file is compared with the hub's checksum, and the model changes only once all files are there.\n\n"
      "A gated model: accept its licence on its page, make a token that may read it, and set HF_TOKEN.\n"
      "--model ORG/NAME of serve, generate, chat and others does the same when the model is missing;\n"
      "HF_HUB_OFFLINE=1 forbids it.\n\n"
      "Exit code: 0 the model is there, 1 it is not (the message says what to do), 2 bad usage, 130 interrupted.");
  app.add_option("MODEL", flags->model, "ORG/NAME, or ORG/NAME@REVISION: a branch, a tag or a commit")
      ->required()
      ->check([](const std::string& text) { return MessageOf(hub::ParseModelName(text).status()); });
  app.add_option("--to", flags->to, "folder to fill instead of the default one")->type_name("DIR");
  app.add_option("--parallel", flags->parallel, "files that are fetched at the same time")
      ->check(CLI::Range(1, 32))
      ->capture_default_str();
  app.add_flag("--if-missing", flags->if_missing,
               "do not ask the hub if the model is there, even if its branch has a newer commit");
  app.add_flag("--json", flags->json, "no progress; print one JSON object at the end");
  flags->hub.Register(app);
  return {&app, [flags] { return RunPull(*flags); }};
}

}  // namespace spl::cli
