// splice logits: the model's logits of given token ids, for comparing with other implementations.
#include <fmt/format.h>

#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "services/base/status.h"
#include "services/engine/engine.h"
#include "services/worker_flags/worker_flags.h"
#include "tools/cli/command.h"
#include "tools/cli/load_model.h"
#include "tools/cli/model_fetch.h"

namespace spl::cli {
namespace {

struct Flags {
  ModelSource model;
  std::string ids_file, output_file;
  std::string backend = "auto", kv_dtype = "auto";
  int32_t num_threads = 0;
};

// [[id, …], …], or one flat list.
absl::StatusOr<std::vector<std::vector<int32_t>>> ReadIds(const std::string& path) {
  std::ifstream in(path);
  if (!in) return Errorf(absl::StatusCode::kNotFound, "{}: cannot open", path);
  nlohmann::json root = nlohmann::json::parse(in, nullptr, /*allow_exceptions=*/false);
  if (root.is_array() && !root.empty() && root[0].is_number()) root = nlohmann::json::array({root});
  if (!root.is_array()) return InvalidArgument("{}: not a JSON list of lists of token ids", path);
  std::vector<std::vector<int32_t>> prompts;
  for (const auto& list : root) {
    if (!list.is_array()) return InvalidArgument("{}: entry {} is not a list of token ids", path, prompts.size());
    std::vector<int32_t>& prompt = prompts.emplace_back();
    for (const auto& id : list) {
      if (!id.is_number_unsigned() || id.get<uint64_t>() > INT32_MAX)
        return InvalidArgument("{}: entry {} holds something that is no token id", path, prompts.size() - 1);
      prompt.push_back(id.get<int32_t>());
    }
  }
  return prompts;
}

absl::Status RunLogits(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const auto prompts, ReadIds(flags.ids_file));
  SPLICE_ASSIGN_OR_RETURN(auto model, LoadModelAndShow(flags.model, flags.backend, flags.kv_dtype));
  const int64_t vocab = model->config().vocab_size;
  SPLICE_ASSIGN_OR_RETURN(auto generator, engine::LocalGenerator::Create(
                                              std::move(model), {.executor = {.num_threads = flags.num_threads}}));
  std::vector<std::vector<float>> logits;
  std::vector<engine::NamedTensor> tensors;
  for (size_t i = 0; i < prompts.size(); ++i) {
    auto all = generator->AllLogits(prompts[i]);
    if (!all.ok()) return Annotate(all.status(), fmt::format("{}: entry {}", flags.ids_file, i));
    logits.push_back(std::move(*all));
  }
  for (size_t i = 0; i < prompts.size(); ++i)
    tensors.push_back({fmt::format("logits_{}", i),
                       engine::TensorType::kF32,
                       {static_cast<int64_t>(prompts[i].size()), vocab},
                       logits[i].data()});
  return engine::WriteSafetensors(flags.output_file, tensors);
}

}  // namespace

Command MakeLogitsCommand(CLI::App& root) {
  auto flags = std::make_shared<Flags>();
  CLI::App& app = *root.add_subcommand("logits", "Logits of every position of given token ids, as safetensors");
  app.footer(
      "Example:\n"
      "  echo '[[4088, 4090, 717], [4088]]' > ids.json\n"
      "  splice logits --model models/splice-tiny --ids ids.json --output logits.safetensors\n"
      "Writes float32 tensors logits_0, logits_1, … of shape [tokens, vocabulary].");
  RequireModelSource(app, flags->model, kModelHelp);
  app.add_option("--ids", flags->ids_file, "JSON file with a list of lists of token ids")->required();
  app.add_option("--output", flags->output_file, "safetensors file to write")->required();
  app.add_option("--backend", flags->backend, "auto, cpu or cuda")->capture_default_str();
  app.add_option("--kv-dtype", flags->kv_dtype, kKvDtypeHelp)->capture_default_str();
  app.add_option("--threads", flags->num_threads, "compute threads; 0: one per core")->check(CLI::Range(0, 1024));
  return {&app, [flags]() -> absl::Status {
            SPLICE_RETURN_IF_ERROR(ResolveModel(flags->model.dir));
            return RunLogits(*flags);
          }};
}

}  // namespace spl::cli
