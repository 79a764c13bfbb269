// Makes the decode methods of services/methods/methods.h.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "services/engine/cache/sequence_kv.h"
#include "services/engine/selection/token_selector.h"

namespace spl::engine {

// By name; "" and "auto" choose the best selector that this build has for a sequence with these head classes, or null:
// with none. Options that leave no layer to choose in (decode_dense_layers) choose `dense` or `head_classes`, too: that
// is what is decoded, and what receipts say. Unimplemented for an unknown one. InvalidArgument: one that needs what a
// sequence with head classes does not keep, classes that there are not, or options out of range.
absl::StatusOr<std::unique_ptr<TokenSelector>> MakeTokenSelector(const DecodeOptions& options,
                                                                 const ModelConfig& config,
                                                                 std::shared_ptr<const StreamClasses> classes);

// MakeTokenSelector for a sequence, which may have left out tokens.
absl::StatusOr<std::unique_ptr<TokenSelector>> MakeSelectorFor(const SequenceKv& kv, const DecodeOptions& options,
                                                               const Model& model);
// The same before there is a sequence, for a prompt of `num_tokens` tokens and a request with this reuse policy: what a
// sequence keeps beside its KV with this selector (CompactNeedsOf) is the most that one will need, whatever the policy
// leaves out. REQUIRES: the policy serves the model (CheckRecoveryPolicy).
absl::StatusOr<std::unique_ptr<TokenSelector>> MakeSelectorBehind(std::string_view policy, int64_t num_tokens,
                                                                  const DecodeOptions& options, const Model& model,
                                                                  std::shared_ptr<const StreamClasses> classes);

}  // namespace spl::engine
