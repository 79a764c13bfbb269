#include "services/worker_flags/worker_grammars.h"

#include <filesystem>
#include <utility>
#include <vector>

#include "services/base/log.h"
#include "services/base/status.h"
#include "services/grammar/grammar_plugin.h"
#include "services/hub/model_places.h"
#include "services/tokenizer/tokenizer.h"

namespace spl {
namespace {

// The folder with the tokenizer. NotFound, InvalidArgument: there is none.
absl::StatusOr<std::string> TokenizerFolder(const std::string& model) {
  if (model.empty()) return absl::NotFoundError("no model folder is given");
  SPLICE_ASSIGN_OR_RETURN(std::string folder,
                          hub::LocalModelFolder(hub::ModelPlaces::FromEnvironment(), model, hub::FolderUse::kTextOnly));
  if (!std::filesystem::exists(folder + "/tokenizer.json"))
    return absl::NotFoundError(folder + " has no tokenizer.json");
  return folder;
}

absl::StatusOr<std::unique_ptr<grammar::GrammarCompiler>> MakeCompilerOf(const std::string& folder,
                                                                         std::vector<int32_t> end_ids, int32_t width) {
  const auto tokenizer = tokenizer::Tokenizer::Load(folder);
  if (!tokenizer.ok())
    return absl::UnimplementedError("structured output needs the model's tokenizer: " + MessageOf(tokenizer.status()));
  grammar::Vocabulary vocabulary{(*tokenizer)->TokenBytes(), std::move(end_ids), width};
  // A tokenizer may know tokens that the model has no logits for.
  if (vocabulary.tokens.size() > static_cast<size_t>(width)) vocabulary.tokens.resize(static_cast<size_t>(width));
  return grammar::MakeGrammarCompiler(vocabulary);
}

}  // namespace

std::shared_ptr<grammar::GrammarCache> MakeWorkerGrammars(const std::string& folder, const engine::Model& model) {
  const absl::StatusOr<std::string> with_tokenizer = TokenizerFolder(folder);
  if (!grammar::HaveGrammarPlugin() || !with_tokenizer.ok()) {
    log::Info("worker.no_structured_output",
              log::F("reason",
                     with_tokenizer.ok() ? "there is no libsplice_xgrammar.so" : MessageOf(with_tokenizer.status())));
    return nullptr;
  }
  // Tenants are not known here; the router has seen to their shares.
  grammar::GrammarCacheOptions options;
  options.running_of_tenant = options.num_threads;
  options.waiting_of_tenant = 256;
  return std::make_shared<grammar::GrammarCache>(
      [folder = *with_tokenizer, end_ids = model.config().eos_ids, width = model.config().vocab_size] {
        return MakeCompilerOf(folder, end_ids, width);
      },
      options);
}

}  // namespace spl
