// Converts proto messages to the engine's plain structs and back, for the prefill and decode programs. Generated types
// go no further down than this.
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

// Fills in defaults of unset fields. engine::ValidateSampling checks ranges.
engine::SamplingParams FromProto(const v1::SamplingParams& proto);

// Policy and numbers; unset fields keep the policy's defaults. "strict" quality is the exact policy.
// engine::ValidateReuseOptions checks ranges.
engine::DecodeOptions DecodeOptionsOf(const v1::ReuseOptions& proto);
engine::ReuseOptions FromProto(const v1::ReuseOptions& proto);

// Copies ranges, namespace keys and the frozen flag; the engine checks them against the prompt. InvalidArgument: a
// malformed namespace key, or a position beyond any prompt.
absl::StatusOr<std::vector<engine::ReuseSpan>> FromProto(
    const google::protobuf::RepeatedPtrField<v1::TokenSegment>& proto);

v1::SampledToken ToProto(const engine::SampledToken& token);
// InvalidArgument: a finish reason for clients only, or an id beyond any vocabulary.
absl::StatusOr<engine::SampledToken> FromProto(const v1::SampledToken& proto);

v1::ModelIdentity IdentityOf(const engine::Model& model);

// Number of pages (blocks) in --kv-bytes of memory. InvalidArgument: too few for a short prompt, or too many to count.
absl::StatusOr<int32_t> PagesOfPool(uint64_t kv_bytes, const engine::Model& model);

// InvalidArgument names `field`: `bytes` does not have the length of a digest.
absl::StatusOr<chunk::Digest> DigestFromBytes(const std::string& bytes, const char* field);
std::string ToBytes(const chunk::Digest& digest);

// FailedPrecondition: the peer's model or page layout differs from ours.
absl::Status CheckFingerprint(const std::string& theirs, const engine::Model& model);
absl::Status CheckLayout(const std::string& theirs, const engine::Model& model);
// The same for its head classes. `who` is for the message.
absl::Status CheckHeadClasses(const std::string& theirs, const engine::Model& model, const std::string& who);
// Head classes to decode a request with; null if its policy has none. FailedPrecondition: the model has no map of head
// classes.
absl::StatusOr<std::shared_ptr<const engine::StreamClasses>> DecodeClassesOf(const engine::ReuseOptions& reuse,
                                                                             const engine::Model& model);

}  // namespace spl::wire
