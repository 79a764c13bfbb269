// splice quantize: writes a model folder again with weights in FP8 or int4.
#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <string>

#include "services/base/byte_size.h"
#include "services/base/status.h"
#include "services/engine/model/quantized_folder.h"
#include "tools/cli/command.h"
#include "tools/cli/model_fetch.h"
#include "tools/cli/progress_line.h"

namespace spl::cli {
namespace {

struct Flags {
  std::string model, out, format = "fp8";
};

constexpr char kFooter[] =
    "Examples:\n"
    "  splice quantize Qwen/Qwen3-8B models/Qwen3-8B-FP8\n"
    "  splice serve --model models/Qwen3-8B-FP8\n"
    "  splice quantize --format int4 Qwen/Qwen3-8B models/Qwen3-8B-int4\n\n"
    "With fp8 the folder has half of the bytes, with int4 a quarter and a little, and so has what a decode step "
    "reads.\n"
    "The matrices of attention, feed-forward and experts are in FP8 (e4m3) with a scale for each output channel, or "
    "in\n"
    "int4 with a scale for each output channel and 128 columns; embedding, head, norms and routers stay as they are.\n"
    "The layouts are those of compressed-tensors (float-quantized, pack-quantized), which other engines read, too. "
    "The\n"
    "values are those of --quantize, which does the same while a model is loaded: the folder starts sooner, and needs\n"
    "no bf16. int4 rounds to nearest and looks at no data: expect more loss than from AWQ or GPTQ.\n\n"
    "What the rounding costs, on your own texts: run `splice eval` with MODEL and with OUT_DIR and the same --seed.\n\n"
    "Shards keep their names; tokenizer, chat template and the other files of the folder are copied, weights in other\n"
    "formats and subfolders are not. head_classes.json is written for the new weights. Until all is there the folder "
    "is\n"
    "called OUT_DIR.partial. Nothing is overwritten.\n\n"
    "Exit code: 0 the folder is there, 1 it is not (the message says what to do), 2 bad usage.";

absl::Status RunQuantize(Flags flags) {
  SPLICE_RETURN_IF_ERROR(ResolveModel(flags.model, hub::FolderUse::kModel));
  absl::StatusOr<engine::QuantizedFolder> folder;
  {
    ProgressLine line;
    folder = engine::WriteQuantizedFolder(
        flags.model, flags.out, engine::QuantizeToFromName(flags.format),
        [&](const engine::QuantizedFolderProgress& at) {
          line.Update(at.done_bytes, at.total_bytes,
                      fmt::format("shard {} of {}, {} of {}", at.shard, at.num_shards, FormatByteSize(at.done_bytes),
                                  FormatByteSize(at.total_bytes)));
        });
  }
  SPLICE_RETURN_IF_ERROR(folder.status());
  fmt::print("{}: {} matrices in {}, {} instead of {}\nnext: splice serve --model {}\n", flags.out,
             folder->num_quantized, flags.format == "fp8" ? "FP8" : "int4", FormatByteSize(folder->bytes_after),
             FormatByteSize(folder->bytes_before), flags.out);
  return absl::OkStatus();
}

}  // namespace

Command MakeQuantizeCommand(CLI::App& root) {
  const auto flags = std::make_shared<Flags>();
  CLI::App& app = *root.add_subcommand("quantize", "Write a model folder again with weights in FP8 or int4");
  app.footer(kFooter);
  app.add_option("MODEL", flags->model, kModelHelp)->required()->type_name("DIR|ORG/NAME");
  app.add_option("OUT_DIR", flags->out, "folder to write; it must not exist")->required()->type_name("DIR");
  app.add_option("--format", flags->format, "fp8: e4m3, a scale per output channel; int4: groups of 128 columns")
      ->check(CLI::IsMember({"fp8", "int4"}))
      ->capture_default_str();
  return {&app, [flags] { return RunQuantize(*flags); }};
}

}  // namespace spl::cli
