#include "services/router/request/structured_output_json.h"

#include <string>
#include <utility>

#include "services/router/request/api_error.h"

namespace spl::router {
namespace {

using grammar::GrammarKind;
using grammar::GrammarSpec;

std::string TextOf(const Json& value) { return value.dump(-1, ' ', false, Json::error_handler_t::replace); }

// Takes the one that the request asks for.
class Collector {
 public:
  Collector(ObjectReader& reader, Sampling* out) : reader_(reader), out_(out) {}

  void Fail(absl::Status status) { reader_.Fail(std::move(status)); }
  void Take(const std::string& field, GrammarSpec spec) {
    if (out_->structured_output.has_value())
      return Fail(ParamError(field, "and {} exclude each other", out_->structured_field));
    out_->structured_output = std::move(spec);
    out_->structured_field = field;
  }

  // A schema as an object, or as its text.
  void Schema(const std::string& field, const Json& value, bool strict) {
    if (value.is_string()) return Take(field, {GrammarKind::kJsonSchema, value.get<std::string>(), strict});
    if (!value.is_object() && !value.is_boolean())
      return Fail(ParamError(field, "must be a JSON schema, got {}", DescribeJson(value)));
    Take(field, {GrammarKind::kJsonSchema, TextOf(value), strict});
  }
  void Text(const std::string& field, const Json& value, GrammarKind kind) {
    if (!value.is_string()) return Fail(ParamError(field, "must be a string, got {}", DescribeJson(value)));
    Take(field, {kind, value.get<std::string>(), false});
  }
  void Choice(const std::string& field, const Json& value) {
    if (!value.is_array()) return Fail(ParamError(field, "must be a list of strings, got {}", DescribeJson(value)));
    Take(field, {GrammarKind::kChoice, TextOf(value), false});
  }

  void ResponseFormat(const Json& format) {
    if (!format.is_object())
      return Fail(ParamError("response_format", "must be an object, got {}", DescribeJson(format)));
    ObjectReader reader(format, "response_format.");
    std::string type;
    reader.String("type", &type);
    const Json* const schema = reader.Raw("json_schema");
    if (const absl::Status known = reader.FinishIgnoring(nullptr); !known.ok()) return Fail(known);
    if (type == "text") return;
    if (type == "json_object") return Take("response_format", {GrammarKind::kJsonObject, "", false});
    if (type != "json_schema")
      return Fail(
          ParamError("response_format.type", "must be \"text\", \"json_object\" or \"json_schema\", got \"{}\"", type));
    if (schema == nullptr) return Fail(ParamError("response_format.json_schema", "is required"));
    JsonSchema(*schema);
  }

 private:
  void JsonSchema(const Json& value) {
    if (!value.is_object())
      return Fail(ParamError("response_format.json_schema", "must be an object, got {}", DescribeJson(value)));
    ObjectReader reader(value, "response_format.json_schema.");
    bool strict = false;
    std::string name, description;
    reader.String("name", &name);
    reader.String("description", &description);
    reader.Bool("strict", &strict);
    const Json* const schema = reader.Raw("schema");
    if (const absl::Status known = reader.FinishIgnoring(nullptr); !known.ok()) return Fail(known);
    if (schema == nullptr) return Fail(ParamError("response_format.json_schema.schema", "is required"));
    Schema("response_format.json_schema.schema", *schema, strict);
  }

  ObjectReader& reader_;
  Sampling* const out_;
};

// vLLM's {"json" | "regex" | "choice" | "grammar" | "json_object": …}.
void ReadStructuredOutputs(const Json& value, Collector& collector) {
  if (!value.is_object())
    return collector.Fail(ParamError("structured_outputs", "must be an object, got {}", DescribeJson(value)));
  ObjectReader reader(value, "structured_outputs.");
  bool json_object = false;
  reader.Bool("json_object", &json_object);
  if (json_object) collector.Take("structured_outputs.json_object", {GrammarKind::kJsonObject, "", false});
  if (const Json* json = reader.Raw("json")) collector.Schema("structured_outputs.json", *json, false);
  if (const Json* regex = reader.Raw("regex")) collector.Text("structured_outputs.regex", *regex, GrammarKind::kRegex);
  if (const Json* choice = reader.Raw("choice")) collector.Choice("structured_outputs.choice", *choice);
  if (const Json* grammar = reader.Raw("grammar"))
    collector.Text("structured_outputs.grammar", *grammar, GrammarKind::kGrammar);
  if (const Json* tag = reader.Raw("structural_tag"))
    collector.Text("structured_outputs.structural_tag", *tag, GrammarKind::kStructuralTag);
  // Whoever asks for another form would not get it.
  collector.Fail(reader.Finish());
}

}  // namespace

void ReadStructuredOutput(ObjectReader& reader, Sampling* out) {
  Collector collector(reader, out);
  if (const Json* format = reader.Raw("response_format")) collector.ResponseFormat(*format);
  if (const Json* outputs = reader.Raw("structured_outputs")) ReadStructuredOutputs(*outputs, collector);
  if (const Json* json = reader.Raw("guided_json")) collector.Schema("guided_json", *json, false);
  if (const Json* regex = reader.Raw("guided_regex")) collector.Text("guided_regex", *regex, GrammarKind::kRegex);
  if (const Json* choice = reader.Raw("guided_choice")) collector.Choice("guided_choice", *choice);
  if (const Json* text = reader.Raw("guided_grammar")) collector.Text("guided_grammar", *text, GrammarKind::kGrammar);
}

}  // namespace spl::router
