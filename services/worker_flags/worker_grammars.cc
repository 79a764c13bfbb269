#include "services/worker_flags/worker_grammars.h"

#include <utility>
#include <vector>

#include "services/base/status.h"
#include "services/grammar/grammar_plugin.h"
#include "services/hub/model_places.h"
#include "services/tokenizer/tokenizer.h"

namespace spl {
namespace {

absl::StatusOr<std::unique_ptr<grammar::GrammarCompiler>> MakeCompilerOf(const std::string& folder,
                                                                         std::vector<int32_t> end_ids, int32_t width) {
  if (folder.empty())
    return absl::UnimplementedError(
        "structured output needs the model's tokenizer, and this worker has none: start it with --model");
  SPLICE_ASSIGN_OR_RETURN(const std::string found,
                          hub::LocalModelFolder(hub::ModelPlaces::FromEnvironment(), folder, hub::FolderUse::kModel));
  const auto tokenizer = tokenizer::Tokenizer::Load(found);
  if (!tokenizer.ok())
    return absl::UnimplementedError("structured output needs the model's tokenizer: " + MessageOf(tokenizer.status()));
  grammar::Vocabulary vocabulary{(*tokenizer)->TokenBytes(), std::move(end_ids), width};
  // A tokenizer may know tokens that the model has no logits for.
  if (vocabulary.tokens.size() > static_cast<size_t>(width)) vocabulary.tokens.resize(static_cast<size_t>(width));
  return grammar::MakeGrammarCompiler(vocabulary);
}

}  // namespace

std::shared_ptr<grammar::GrammarCache> MakeWorkerGrammars(const std::string& folder, const engine::Model& model) {
  // Tenants are not known here; the router has seen to their shares.
  grammar::GrammarCacheOptions options;
  options.running_of_tenant = options.num_threads;
  options.waiting_of_tenant = 256;
  return std::make_shared<grammar::GrammarCache>(
      [folder, end_ids = model.config().eos_ids, width = model.config().vocab_size] {
        return MakeCompilerOf(folder, end_ids, width);
      },
      options);
}

}  // namespace spl
