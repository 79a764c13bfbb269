// The grammars of a worker: compiled for its model's tokens, which it reads from a folder with a tokenizer.
#pragma once

#include <memory>
#include <string>

#include "services/engine/engine.h"
#include "services/grammar/grammar_cache.h"

namespace spl {

// Null where structured output cannot be served, which is logged: without libsplice_xgrammar.so, or where `folder` (a
// model folder, or ORG/NAME of a model on this machine) is empty or has no tokenizer. Reads nothing yet: the tokenizer
// is loaded when the first request for structured output comes.
std::shared_ptr<grammar::GrammarCache> MakeWorkerGrammars(const std::string& folder, const engine::Model& model);

}  // namespace spl
