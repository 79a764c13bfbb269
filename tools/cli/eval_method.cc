#include "tools/cli/eval_method.h"

#include "services/base/status.h"

namespace spl::cli {

const char* ProvenanceName(Provenance provenance) {
  return provenance == Provenance::kContext ? "context" : "isolated";
}

namespace {

// The name in front, and the options behind it as members of `options`.
absl::StatusOr<std::string> ParseMethod(const char* flag, const std::string& text, const std::string& prefix,
                                        const char* example, nlohmann::json& options) {
  size_t begin = text.find(':');
  std::string name = text.substr(0, begin);
  while (begin != std::string::npos) {
    const size_t end = text.find(':', begin + 1);
    const std::string option = text.substr(begin + 1, end == std::string::npos ? end : end - begin - 1);
    const size_t equals = option.find('=');
    const nlohmann::json value = equals == std::string::npos
                                     ? nlohmann::json()
                                     : nlohmann::json::parse(option.substr(equals + 1), nullptr, false);
    if (!value.is_number() && !value.is_boolean())
      return InvalidArgument("{} {}: '{}' is not OPTION=NUMBER or OPTION=true, as in {}", flag, text, option, example);
    options[prefix + option.substr(0, equals)] = value;
    begin = end;
  }
  return name;
}

}  // namespace

absl::StatusOr<EvalMethod> ParseEvalMethod(const std::string& reuse, const std::string& decode,
                                           const std::string& provenance) {
  EvalMethod method{.label = reuse, .decode_label = decode};
  if (provenance == "isolated") {
    method.provenance = Provenance::kIsolated;
  } else if (provenance != "context") {
    return InvalidArgument("--provenance {}: it must be context or isolated", provenance);
  }
  SPLICE_ASSIGN_OR_RETURN(method.reuse, ParseMethod("--reuse", reuse, "", "sparsex:dense_layers=2", method.options));
  SPLICE_ASSIGN_OR_RETURN(method.decode,
                          ParseMethod("--decode", decode, "decode_", "sparcas:budget=1024", method.options));
  return method;
}

}  // namespace spl::cli
