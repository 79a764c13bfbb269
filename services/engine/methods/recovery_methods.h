// Makes the prefill methods of services/methods/methods.h.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "services/engine/recovery/recovery_policy.h"
#include "services/engine/recovery/reuse_options.h"

namespace spl::engine {

// Whether the policy computes, and by default decodes, with head classes.
bool UsesHeadClasses(const ReuseOptions& options);

// Whether the policy may run a stage whole: the executor then needs room for the rows of a prompt
// (ExecutorOptions::max_span_rows).
bool RunsWholeSpans(const ReuseOptions& options);

// Unimplemented for an unknown policy, with the names there are. FailedPrecondition: it needs head classes. `config`
// and the map outlive the policy.
absl::StatusOr<std::unique_ptr<RecoveryPolicy>> MakeRecoveryPolicy(const ReuseOptions& options,
                                                                   const ModelConfig& config,
                                                                   const HeadClassMap* head_classes = nullptr);
// The errors of the same for a worker that only decodes what the policy leaves: nothing is reserved for a prompt that a
// prefill worker of this model would refuse.
absl::Status CheckRecoveryPolicy(const ReuseOptions& options, const ModelConfig& config,
                                 const HeadClassMap* head_classes = nullptr);
// The policy that "auto" stands for, of a prompt with segments: splice with a map whose quality was measured and is
// within the contract, else sparsex.
std::string DefaultReusePolicy(const HeadClassMap* head_classes);

}  // namespace spl::engine
