// Makes the decode methods of services/methods/methods.h.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "services/engine/cache/sequence_kv.h"
#include "services/engine/selection/token_selector.h"

namespace spl::engine {

// Makes a selector by name. "" and "auto" choose the best selector that this build has for a sequence with these head
// classes (null: without). Options that leave no layer to choose in (decode_dense_layers) give `dense` or
// `head_classes`, because that is what is decoded and what receipts say. Unimplemented: unknown name. InvalidArgument:
// a selector that needs KV that a sequence with head classes does not keep, a selector whose head classes are missing,
// or options out of range.
absl::StatusOr<std::unique_ptr<TokenSelector>> MakeTokenSelector(const DecodeOptions& options,
                                                                 const ModelConfig& config,
                                                                 std::shared_ptr<const StreamClasses> classes);

// The same options, with packed keys if `dims` leaves it open and they ask for them, or the model's backend is faster
// with them (Backend::PrefersPackedKeys). For selectors without lists of kept tokens. Without packed keys if the tokens
// that are always attended to do not fill a tile.
DecodeOptions WithKeys(DecodeOptions options, const Model& model);

// MakeTokenSelector for a sequence, whose prompt may have been kept only in part.
absl::StatusOr<std::unique_ptr<TokenSelector>> MakeSelectorFor(const SequenceKv& kv, const DecodeOptions& options,
                                                               const Model& model);
// The same before the sequence exists, for a prompt of `num_tokens` tokens and a request with this reuse policy. The
// memory beside the KV that this selector needs (CompactNeedsOf) is an upper bound for the sequence, whatever the
// policy leaves out. REQUIRES: the policy serves the model (CheckRecoveryPolicy).
absl::StatusOr<std::unique_ptr<TokenSelector>> MakeSelectorBehind(std::string_view policy, int64_t num_tokens,
                                                                  const DecodeOptions& options, const Model& model,
                                                                  std::shared_ptr<const StreamClasses> classes);

}  // namespace spl::engine
