#include "services/router/dispatch/request_grammar.h"

#include <string>
#include <utility>

#include "services/grammar/grammar_plugin.h"
#include "services/router/request/api_error.h"

namespace spl::router {
namespace {

absl::Status InField(const absl::Status& status, const std::string& field) {
  if (status.code() == absl::StatusCode::kInvalidArgument) return ParamError(field, "{}", MessageOf(status));
  if (status.code() == absl::StatusCode::kUnimplemented)
    return SetErrorCode(SetParam(status, field), "structured_output_unavailable");
  return status;
}

}  // namespace

absl::Status GrammarStatus(const absl::Status& status, const GenerationRequest& request) {
  return InField(status, request.sampling.structured_field);
}

grammar::MakeCompiler CompilerOf(const ServedModel& model) {
  return [&model]() -> absl::StatusOr<std::unique_ptr<grammar::GrammarCompiler>> {
    const tokenizer::Tokenizer& tokenizer = model.tokenizer();
    if (tokenizer.vocab_size() == 0)
      return absl::UnimplementedError("structured output needs the model's tokenizer, and this router has none");
    return grammar::MakeGrammarCompiler({.tokens = tokenizer.TokenBytes(),
                                         .end_ids = {tokenizer.eos_ids().begin(), tokenizer.eos_ids().end()},
                                         .width = tokenizer.vocab_size()});
  };
}

void CheckGrammar(grammar::GrammarCache& grammars, const GenerationRequest& request,
                  std::function<void(absl::Status)> done) {
  const Sampling& sampling = request.sampling;
  if (!sampling.structured_output.has_value()) return done(absl::OkStatus());
  grammars.Get(*sampling.structured_output, request.caller.name,
               [field = sampling.structured_field, done = std::move(done)](const grammar::CompiledGrammar& grammar) {
                 done(grammar.ok() ? absl::OkStatus() : InField(grammar.status(), field));
               });
}

}  // namespace spl::router
