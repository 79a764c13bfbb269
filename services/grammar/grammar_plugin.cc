#include "services/grammar/grammar_plugin.h"

#include <dlfcn.h>

#include "kernels/common/plugin.h"
#include "services/base/status.h"

namespace spl::grammar {
namespace {

struct Plugin {
  GrammarPluginMake make = nullptr;
  absl::Status error;
};

const Plugin& OpenOnce() {
  static const Plugin plugin = [] {
    Plugin opened;
    const absl::StatusOr<void*> library = kernels::OpenPlugin("splice_xgrammar", "SPLICE_XGRAMMAR_PLUGIN");
    if (library.ok()) opened.make = reinterpret_cast<GrammarPluginMake>(dlsym(*library, kGrammarPluginMake));
    if (opened.make == nullptr)
      opened.error = Errorf(absl::StatusCode::kUnimplemented,
                            "structured output needs libsplice_xgrammar.so, which this build lacks: ./dev build makes "
                            "it where the source archive of xgrammar can be fetched ({})",
                            library.ok() ? "the library has no entry" : MessageOf(library.status()));
    return opened;
  }();
  return plugin;
}

}  // namespace

bool HaveGrammarPlugin() { return OpenOnce().make != nullptr; }

absl::StatusOr<std::unique_ptr<GrammarCompiler>> MakeGrammarCompiler(const Vocabulary& vocabulary) {
  const Plugin& plugin = OpenOnce();
  if (plugin.make == nullptr) return plugin.error;
  if (vocabulary.end_ids.empty())
    return absl::InvalidArgumentError("structured output needs a model with an end token (eos_token_id)");
  if (vocabulary.width < 1 || vocabulary.tokens.size() > static_cast<size_t>(vocabulary.width))
    return InvalidArgument("the vocabulary has {} tokens, a row of logits {}", vocabulary.tokens.size(),
                           vocabulary.width);
  absl::Status error;
  std::unique_ptr<GrammarCompiler> compiler(plugin.make(kernels::PluginBuild(), vocabulary, error));
  if (!error.ok()) return error;
  return compiler;
}

}  // namespace spl::grammar
