// Makes the prefill methods of services/methods/methods.h.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "services/engine/model/recovery_profile.h"
#include "services/engine/recovery/recovery_policy.h"
#include "services/engine/recovery/reuse_options.h"

namespace spl::engine {

// Whether the policy computes with head classes. By default the request is then decoded with them, too.
bool UsesHeadClasses(const ReuseOptions& options);

// Whether the policy may run a stage whole. The executor then needs room for all rows of a prompt
// (ExecutorOptions::max_span_rows).
bool RunsWholeSpans(const ReuseOptions& options);

// Makes the policy of a request. Unimplemented: unknown policy; the message lists the known ones. FailedPrecondition:
// the policy needs head classes. `config`, the map and the profile outlive the policy.
absl::StatusOr<std::unique_ptr<RecoveryPolicy>> MakeRecoveryPolicy(const ReuseOptions& options,
                                                                   const ModelConfig& config,
                                                                   const HeadClassMap* head_classes = nullptr,
                                                                   const RecoveryProfile* recovery = nullptr);
// The errors of MakeRecoveryPolicy, for a decode worker: it reserves no KV for a prompt that a prefill worker of this
// model would refuse.
absl::Status CheckRecoveryPolicy(const ReuseOptions& options, const ModelConfig& config,
                                 const HeadClassMap* head_classes = nullptr);
// The policy that "auto" stands for when a prompt of `num_tokens` has segments: splice if the map's quality was
// measured with prompts as long and is within the contract, otherwise sparsex.
std::string DefaultReusePolicy(const HeadClassMap* head_classes, int64_t num_tokens);

}  // namespace spl::engine
