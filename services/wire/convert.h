// Between proto messages and the engine's plain structs. For the prefill and decode programs: generated types go no
// further down than this.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/engine/engine.h"
#include "spl/v1/common.pb.h"
#include "spl/v1/decode.pb.h"

namespace spl::wire {

// Fills defaults of unset fields. Ranges are checked by engine::ValidateSampling.
engine::SamplingParams FromProto(const v1::SamplingParams& proto);

// Policy and numbers; unset ones keep the policy's defaults. "strict" quality is the exact policy. Ranges are checked
// by engine::ValidateReuseOptions.
engine::DecodeOptions DecodeOptionsOf(const v1::ReuseOptions& proto);
engine::ReuseOptions FromProto(const v1::ReuseOptions& proto);
// Ranges are checked by engine::ValidateHeadRestoreOptions.
engine::HeadRestoreOptions HeadRestoreOptionsOf(const v1::ReuseOptions& proto);

// Ranges, namespace keys and which are frozen, as they came; the engine checks them against the prompt.
// InvalidArgument: a namespace key that is none, or a position beyond any prompt.
absl::StatusOr<std::vector<engine::ReuseSpan>> FromProto(
    const google::protobuf::RepeatedPtrField<v1::TokenSegment>& proto);

v1::KeySummary ToProto(const engine::KeySummary& summary);
// InvalidArgument: a stream that is none of the model, or another number of bytes than its pages have.
absl::StatusOr<engine::KeySummary> FromProto(const v1::KeySummary& proto, const engine::Model& model);

v1::SampledToken ToProto(const engine::SampledToken& token);
// InvalidArgument: a finish reason that only clients see, or an id beyond any vocabulary.
absl::StatusOr<engine::SampledToken> FromProto(const v1::SampledToken& proto);

v1::ModelIdentity IdentityOf(const engine::Model& model);

// Pages that --kv-bytes of memory make. InvalidArgument when they are too few for a short prompt or too many to count.
absl::StatusOr<int32_t> PagesOfPool(uint64_t kv_bytes, const engine::Model& model);

// InvalidArgument names `field` unless `bytes` has the length of a digest.
absl::StatusOr<chunk::Digest> DigestFromBytes(const std::string& bytes, const char* field);
std::string ToBytes(const chunk::Digest& digest);

// FailedPrecondition when a peer's model or page layout is not ours.
absl::Status CheckFingerprint(const std::string& theirs, const engine::Model& model);
absl::Status CheckLayout(const std::string& theirs, const engine::Model& model);
// Likewise its head classes; `who` is for the message.
absl::Status CheckHeadClasses(const std::string& theirs, const engine::Model& model, const std::string& who);
// What a request decodes with: the model's classes, null when its policy has none. FailedPrecondition: the model has no
// map.
absl::StatusOr<std::shared_ptr<const engine::StreamClasses>> DecodeClassesOf(const engine::ReuseOptions& reuse,
                                                                             const engine::Model& model);

}  // namespace spl::wire
