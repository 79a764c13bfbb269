// Structured output on the wire, and the grammar of a request at a worker. Without the engine: also for the router.
#pragma once

#include <functional>
#include <optional>

#include "services/grammar/grammar_cache.h"
#include "services/grammar/token_grammar.h"
#include "spl/v1/common.pb.h"

namespace spl::wire {

// nullopt: any text.
std::optional<grammar::GrammarSpec> GrammarSpecOf(const v1::SamplingParams& sampling);
void SetGrammarSpec(const grammar::GrammarSpec& spec, v1::SamplingParams& sampling);

// Calls `done` with the request's grammar, as GrammarCache::Get does, or with null where it asks for none. `cache`
// null: Unimplemented, the worker has none.
void FindGrammar(grammar::GrammarCache* cache, const v1::SamplingParams& sampling,
                 std::function<void(grammar::CompiledGrammar)> done);

}  // namespace spl::wire
