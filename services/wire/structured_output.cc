#include "services/wire/structured_output.h"

#include <utility>

#include "absl/status/status.h"

namespace spl::wire {

using grammar::GrammarKind;
using grammar::GrammarSpec;

std::optional<GrammarSpec> GrammarSpecOf(const v1::SamplingParams& sampling) {
  const v1::StructuredOutput& output = sampling.structured_output();
  switch (output.kind_case()) {
    case v1::StructuredOutput::kJsonObject:
      if (!output.json_object()) return std::nullopt;
      return GrammarSpec{GrammarKind::kJsonObject, "", false};
    case v1::StructuredOutput::kJsonSchema:
      return GrammarSpec{GrammarKind::kJsonSchema, output.json_schema(), output.strict()};
    case v1::StructuredOutput::kRegex:
      return GrammarSpec{GrammarKind::kRegex, output.regex(), false};
    case v1::StructuredOutput::kChoice:
      return GrammarSpec{GrammarKind::kChoice, output.choice(), false};
    case v1::StructuredOutput::kGrammar:
      return GrammarSpec{GrammarKind::kGrammar, output.grammar(), false};
    case v1::StructuredOutput::kStructuralTag:
      return GrammarSpec{GrammarKind::kStructuralTag, output.structural_tag(), false};
    case v1::StructuredOutput::KIND_NOT_SET:
      return std::nullopt;
  }
  return std::nullopt;
}

void SetGrammarSpec(const GrammarSpec& spec, v1::SamplingParams& sampling) {
  v1::StructuredOutput& output = *sampling.mutable_structured_output();
  switch (spec.kind) {
    case GrammarKind::kJsonObject:
      return output.set_json_object(true);
    case GrammarKind::kJsonSchema:
      output.set_strict(spec.strict);
      return output.set_json_schema(spec.text);
    case GrammarKind::kRegex:
      return output.set_regex(spec.text);
    case GrammarKind::kChoice:
      return output.set_choice(spec.text);
    case GrammarKind::kGrammar:
      return output.set_grammar(spec.text);
    case GrammarKind::kStructuralTag:
      return output.set_structural_tag(spec.text);
  }
}

void FindGrammar(grammar::GrammarCache* cache, const v1::SamplingParams& sampling,
                 std::function<void(grammar::CompiledGrammar)> done) {
  const std::optional<GrammarSpec> spec = GrammarSpecOf(sampling);
  if (!spec.has_value()) return done(std::shared_ptr<const grammar::TokenGrammar>());
  if (cache == nullptr)
    return done(absl::UnimplementedError(
        "this worker serves no structured output: it needs libsplice_xgrammar.so beside the program and a model folder "
        "with a tokenizer (--model)"));
  cache->Get(*spec, "", std::move(done));
}

}  // namespace spl::wire
