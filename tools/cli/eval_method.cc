#include "tools/cli/eval_method.h"

#include <algorithm>
#include <cmath>

#include "services/base/status.h"
#include "services/engine/recovery/reuse_options.h"

namespace spl::cli {

const char* ProvenanceName(Provenance provenance) {
  switch (provenance) {
    case Provenance::kContext:
      return "context";
    case Provenance::kIsolated:
      return "isolated";
    case Provenance::kForeign:
      return "foreign";
  }
  return "?";
}

const char* ProvenancePhrase(const std::string& name) {
  if (name == "context") return "in context";
  return name == "isolated" ? "in isolation" : "behind other text";
}

namespace {

// Returns the name, and adds the options behind it to `options`.
absl::StatusOr<std::string> ParseMethod(const char* flag, const std::string& text, const std::string& prefix,
                                        const char* example, nlohmann::json& options) {
  size_t begin = text.find(':');
  std::string name = text.substr(0, begin);
  while (begin != std::string::npos) {
    const size_t end = text.find(':', begin + 1);
    const std::string option = text.substr(begin + 1, end == std::string::npos ? end : end - begin - 1);
    const size_t equals = option.find('=');
    nlohmann::json value = equals == std::string::npos
                               ? nlohmann::json()
                               : nlohmann::json::parse(option.substr(equals + 1), nullptr, false);
    // A value may be a word: recompute=none.
    if (value.is_discarded() && equals + 1 < option.size() &&
        option.find_first_not_of("abcdefghijklmnopqrstuvwxyz_", equals + 1) == std::string::npos)
      value = option.substr(equals + 1);
    if (!value.is_number() && !value.is_boolean() && !value.is_string())
      return InvalidArgument("{} {}: '{}' is not OPTION=NUMBER, OPTION=true or OPTION=word, as in {}", flag, text,
                             option, example);
    options[prefix + option.substr(0, equals)] = value;
    begin = end;
  }
  return name;
}

// Takes the option `name`, a share of the context, out of `options`; 0: it is not there.
absl::StatusOr<double> TakeContextShare(const std::string& name, const char* flag, const std::string& text,
                                        nlohmann::json& options) {
  const auto option = options.find(name);
  if (option == options.end()) return 0;
  const double share = option->is_number() ? option->get<double>() : 0;
  if (!(share > 0 && share <= 1))
    return InvalidArgument("{} {}: context_share is a share of the context, above 0 and at most 1", flag, text);
  options.erase(option);
  return share;
}

}  // namespace

absl::StatusOr<EvalMethod> ParseEvalMethod(const std::string& reuse, const std::string& decode,
                                           const std::string& provenance) {
  EvalMethod method{.label = reuse, .decode_label = decode};
  bool known = false;
  for (const Provenance p : {Provenance::kContext, Provenance::kIsolated, Provenance::kForeign}) {
    if (provenance != ProvenanceName(p)) continue;
    method.provenance = p;
    known = true;
  }
  if (!known) return InvalidArgument("--provenance {}: it must be context, isolated or foreign", provenance);
  SPLICE_ASSIGN_OR_RETURN(method.reuse, ParseMethod("--reuse", reuse, "", "sparsex:dense_layers=2", method.options));
  SPLICE_ASSIGN_OR_RETURN(method.decode,
                          ParseMethod("--decode", decode, "decode_", "sparcas:budget=1024", method.options));
  SPLICE_ASSIGN_OR_RETURN(method.decode_context_share,
                          TakeContextShare("decode_context_share", "--decode", decode, method.options));
  if (method.reuse == "a-shape" || method.reuse == "tri-shape") {
    SPLICE_ASSIGN_OR_RETURN(method.band_context_share,
                            TakeContextShare("context_share", "--reuse", reuse, method.options));
  }
  return method;
}

nlohmann::json OptionsFor(const EvalMethod& method, int64_t length) {
  nlohmann::json options = method.options;
  if (method.decode_context_share > 0) {
    constexpr double kStep = 16;  // tokens of a page of quest
    const double steps = std::round(method.decode_context_share * static_cast<double>(length) / kStep);
    options["decode_budget"] = static_cast<int64_t>(kStep * std::max(steps, 1.0));
  }
  if (method.band_context_share > 0) {
    const engine::ReuseOptions published;
    const int64_t most = published.band_sinks + published.band_window;
    const auto tokens = static_cast<int64_t>(method.band_context_share * static_cast<double>(length));
    const int64_t band = std::clamp<int64_t>(tokens, 2, most), sinks = band * published.band_sinks / most;
    options["band_sinks"] = sinks;
    options["band_window"] = band - sinks;
  }
  return options;
}

}  // namespace spl::cli
