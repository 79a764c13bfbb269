// Opens libsplice_xgrammar.so, which compiles grammars with xgrammar. Only who is asked for structured output needs it.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/grammar/token_grammar.h"

namespace spl::grammar {

// True if the plug-in could be opened; the first call tries.
bool HaveGrammarPlugin();

// Unimplemented: the plug-in is not there; the message says what to do. InvalidArgument: the vocabulary has no end
// token, or more tokens than its width. Some 100 ms for 128K tokens.
absl::StatusOr<std::unique_ptr<GrammarCompiler>> MakeGrammarCompiler(const Vocabulary& vocabulary);

// The plug-in's export: name and signature.
inline constexpr char kGrammarPluginMake[] = "splice_xgrammar_make";
using GrammarPluginMake = GrammarCompiler* (*)(const char* build, const Vocabulary& vocabulary, absl::Status& error);

}  // namespace spl::grammar
