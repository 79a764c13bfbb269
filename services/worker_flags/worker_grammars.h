// The grammars of a worker: compiled for its model's tokens, which it reads from a folder with a tokenizer.
#pragma once

#include <memory>
#include <string>

#include "services/engine/engine.h"
#include "services/grammar/grammar_cache.h"

namespace spl {

// Reads nothing yet: the tokenizer is loaded when the first request for structured output comes. Where `folder` (a
// model folder, or ORG/NAME of a model on this machine) is empty or has no tokenizer, these requests are refused with
// Unimplemented, which says so.
std::shared_ptr<grammar::GrammarCache> MakeWorkerGrammars(const std::string& folder, const engine::Model& model);

}  // namespace spl
