#include "services/router/request/sampling_defaults.h"

#include <filesystem>

#include "services/base/read_file.h"
#include "services/base/status.h"
#include "services/router/request/json_reader.h"

namespace spl::router {
namespace {

absl::StatusOr<Sampling> ParseSamplingDefaults(const std::string& text) {
  SPLICE_ASSIGN_OR_RETURN(const Json config, ParseJson(text));
  if (!config.is_object()) return absl::InvalidArgumentError("must hold a JSON object");
  Json members = Json::object();  // a reader refuses members that it does not know
  for (const char* name : {"do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}) {
    if (const auto member = config.find(name); member != config.end()) members[name] = *member;
  }
  if (members.value("top_k", Json()) == Json(-1)) members.erase("top_k");  // vLLM's "all"
  GenerationRequest request;
  Sampling& sampling = request.sampling;
  ObjectReader reader(members, "");
  bool do_sample = true;
  reader.Bool("do_sample", &do_sample);
  reader.Float("temperature", &sampling.temperature);
  reader.Uint32("top_k", &sampling.top_k);
  reader.Float("top_p", &sampling.top_p);
  reader.Float("min_p", &sampling.min_p);
  reader.Float("repetition_penalty", &sampling.repetition_penalty);
  SPLICE_RETURN_IF_ERROR(reader.Finish());
  if (!do_sample) sampling.temperature = 0;
  SPLICE_RETURN_IF_ERROR(ValidateRequest(request));
  return sampling;
}

}  // namespace

absl::StatusOr<Sampling> LoadSamplingDefaults(const std::string& model_dir) {
  const std::string path = model_dir + "/generation_config.json";
  if (!std::filesystem::exists(path)) return Sampling();
  SPLICE_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  absl::StatusOr<Sampling> sampling = ParseSamplingDefaults(text);
  if (!sampling.ok()) return Annotate(sampling.status(), path + " (--generation-config none leaves it alone)");
  return sampling;
}

}  // namespace spl::router
