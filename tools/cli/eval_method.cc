#include "tools/cli/eval_method.h"

#include "services/base/status.h"

namespace spl::cli {

const char* ProvenanceName(Provenance provenance) {
  return provenance == Provenance::kContext ? "context" : "isolated";
}

absl::StatusOr<EvalMethod> ParseEvalMethod(const std::string& reuse, const std::string& decode,
                                           const std::string& provenance) {
  EvalMethod method{.label = reuse, .decode = decode};
  if (provenance == "isolated") {
    method.provenance = Provenance::kIsolated;
  } else if (provenance != "context") {
    return InvalidArgument("--provenance {}: it must be context or isolated", provenance);
  }
  size_t begin = reuse.find(':');
  method.reuse = reuse.substr(0, begin);
  while (begin != std::string::npos) {
    const size_t end = reuse.find(':', begin + 1);
    const std::string option = reuse.substr(begin + 1, end == std::string::npos ? end : end - begin - 1);
    const size_t equals = option.find('=');
    const nlohmann::json value = equals == std::string::npos
                                     ? nlohmann::json()
                                     : nlohmann::json::parse(option.substr(equals + 1), nullptr, false);
    if (!value.is_number() && !value.is_boolean())
      return InvalidArgument("--reuse {}: '{}' is not OPTION=NUMBER or OPTION=true, as in sparsex:dense_layers=2",
                             reuse, option);
    method.options[option.substr(0, equals)] = value;
    begin = end;
  }
  return method;
}

}  // namespace spl::cli
