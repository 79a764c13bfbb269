// The grammar of a request's answer, checked before anything is sent to a worker.
#pragma once

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "services/grammar/grammar_cache.h"
#include "services/router/request/request.h"
#include "services/router/request/served_model.h"

namespace spl::router {

// Makes the compiler for the tokens of the model. Unimplemented: it has no tokenizer.
grammar::MakeCompiler CompilerOf(const ServedModel& model);

// An error about the request's grammar as its client reads it: with the name of the field that asked for it.
absl::Status GrammarStatus(const absl::Status& status, const GenerationRequest& request);

// Compiles the request's grammar, if it has one, on a thread of the cache; calls `done` as GrammarCache::Get does.
// InvalidArgument names the field that asked for it and the compiler's reason.
void CheckGrammar(grammar::GrammarCache& grammars, const GenerationRequest& request,
                  std::function<void(absl::Status)> done);

}  // namespace spl::router
