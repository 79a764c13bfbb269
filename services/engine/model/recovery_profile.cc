#include "services/engine/model/recovery_profile.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "services/base/field_error.h"
#include "services/base/ids.h"
#include "services/base/json_object_reader.h"
#include "services/base/json_parser.h"
#include "services/base/read_file.h"
#include "services/base/status.h"
#include "services/engine/model/model_identity.h"

namespace spl::engine {
namespace {

using nlohmann::json;

constexpr char kFormat[] = "splice-recovery-1";

}  // namespace

absl::StatusOr<RecoveryProfile> RecoveryProfile::Parse(const std::string& text, const std::string& source) {
  SPLICE_ASSIGN_OR_RETURN(const json root, ParseJsonObject(text, source));
  JsonObjectReader<json> fields(root, source + ": ");
  if (fields.StringOr("format", "") != kFormat)
    return FieldError(source + ": format",
                      fmt::format("must be \"{}\": splice profile --recovery-from writes it", kFormat));
  RecoveryProfile profile;
  profile.num_layers = fields.RequireInt("num_layers", 1, 4096);
  profile.probe_layers = fields.RequireInt("probe_layers", 1, std::max(1, profile.num_layers));
  profile.score_layers = fields.RequireInt("score_layers", 1, std::max(1, profile.probe_layers));
  profile.recompute_share = fields.PositiveOr("recompute_share", 0);
  if (!(profile.recompute_share > 0 && profile.recompute_share <= 1))
    fields.Fail("recompute_share", "must be above 0 and at most 1");
  if (const json* object = fields.Object("measured"); object != nullptr) {
    JsonObjectReader<json> inner(*object, source + ": measured.");
    profile.data = inner.StringOr("data", "");
    profile.answers = inner.RequireInt("answers", 1, INT32_MAX);
    profile.exact = inner.RequireInt("exact", 0, profile.answers);
    profile.right = inner.RequireInt("right", 0, profile.answers);
    SPLICE_RETURN_IF_ERROR(inner.status());
  }
  profile.fingerprint = ReadModelFingerprint(fields);
  SPLICE_RETURN_IF_ERROR(fields.status());
  return profile;
}

absl::StatusOr<RecoveryProfile> RecoveryProfile::Load(const std::string& path) {
  SPLICE_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  return Parse(text, path);
}

std::string RecoveryProfile::ToJson() const {
  nlohmann::ordered_json out;
  out["format"] = kFormat;
  if (fingerprint != chunk::Digest{}) out["model_fingerprint"] = HexEncode(fingerprint);
  out["num_layers"] = num_layers;
  out["probe_layers"] = probe_layers;
  out["score_layers"] = score_layers;
  out["recompute_share"] = recompute_share;
  if (answers > 0) out["measured"] = {{"data", data}, {"answers", answers}, {"exact", exact}, {"right", right}};
  return out.dump(1) + "\n";
}

absl::Status RecoveryProfile::CheckModel(int32_t model_layers, const chunk::Digest& model_fingerprint) const {
  if (model_layers != num_layers)
    return Errorf(
        absl::StatusCode::kFailedPrecondition,
        "the recovery profile is for {} layers, the model has {}: measure it with splice eval --suite recovery",
        num_layers, model_layers);
  if (fingerprint != chunk::Digest{} && fingerprint != model_fingerprint)
    return Errorf(absl::StatusCode::kFailedPrecondition,
                  "the recovery profile was measured on a model with the fingerprint {}…, this one has {}…: measure it "
                  "with splice eval --suite recovery",
                  HexEncode(fingerprint).substr(0, 12), HexEncode(model_fingerprint).substr(0, 12));
  return absl::OkStatus();
}

}  // namespace spl::engine
