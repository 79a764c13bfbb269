// The flags --model, --random-weights, --endpoint and related ones, shared by generate, chat and eval.
#pragma once

#include <CLI/CLI.hpp>

#include "services/router/request/generation_config_flag.h"
#include "services/worker_flags/worker_flags.h"
#include "tools/cli/model_fetch.h"
#include "tools/cli/text_generator.h"

namespace spl::cli {

inline void AddSourceFlags(CLI::App& app, SourceFlags& flags) {
  auto* group = app.add_option_group("source");
  AddModelSourceFlags(*group, flags.model, kModelHelp);
  group->add_option("--endpoint", flags.endpoint, "a running server: http[s]://HOST:PORT or grpc[s]://HOST:PORT");
  group->require_option(1);
  AddHeadClassesFlag(app, flags.model);
  AddQuantizeFlag(app, flags.model);
  app.add_option("--api-key", flags.api_key, "bearer token for --endpoint; also from SPLICE_API_KEY")
      ->envname("SPLICE_API_KEY");
  AddCaFlag(app, flags.ca_file);
  app.add_option("--tokenizer", flags.tokenizer_dir,
                 "folder with tokenizer.json; default: the model folder; needed with --random-weights");
  app.add_option("--backend", flags.backend, "with --model: auto, cpu or cuda")->capture_default_str();
  app.add_option("--kv-dtype", flags.kv_dtype, "with --model: type of cached K and V: auto, f32, bf16 or fp8")
      ->capture_default_str();
  app.add_option("--tp", flags.tp, "with --model: tensor parallelism, GPUs or ranks")
      ->check(CLI::IsMember({1, 2, 4, 8}))
      ->capture_default_str();
  app.add_option("--threads", flags.num_threads, "with --model: compute threads; 0: one per core")
      ->check(CLI::Range(0, 1024));
}

// The flags of a model in this process that concern how it is asked; for generate and chat.
inline void AddPromptFlags(CLI::App& app, SourceFlags& flags) {
  app.add_flag("--special-tokens-in-text", flags.special_tokens_in_text,
               "with --model: parse special tokens in messages as well");
  router::AddGenerationConfigFlag(app, flags.generation_config);
}

}  // namespace spl::cli
