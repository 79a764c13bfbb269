// Selector `kept_tokens`: behind a prompt of which tokens were left out, a query of each layer sees what that layer
// keeps, and everything behind the prompt (SamKV; algorithms.md section 3, "custom heads" of section 8). The lists lie
// in the sequence's compact pages, on the device, where each step joins its own position (BeginLists,
// kernels/selection/ query_window.h).
#pragma once

#include <memory>
#include <string_view>

#include "services/engine/cache/kept_tokens.h"
#include "services/engine/selection/choosing_selector.h"

namespace spl::engine {

class KeptTokensSelector final : public ChoosingSelector {
 public:
  // REQUIRES: a list for each layer of `config`, which has no sliding windows.
  KeptTokensSelector(const ModelConfig& config, std::shared_ptr<const KeptTokens> kept);
  std::string_view name() const override { return "kept_tokens"; }
  void BeginStep(int64_t kv_len) override;
  ScoringPlan scoring() const override;
  KeptPositions lists(int64_t num_tokens) const override;

 private:
  const std::shared_ptr<const KeptTokens> kept_;
  const int32_t num_kv_heads_;
  const int64_t longest_;  // of the prompt's lists
  int64_t kv_len_;         // of the step
};

// MakeTokenSelector for a sequence, which may have left out tokens: then "", "auto" and "dense" give the selector
// above, and others are InvalidArgument.
absl::StatusOr<std::unique_ptr<TokenSelector>> MakeSelectorFor(const SequenceKv& kv, const DecodeOptions& options,
                                                               const Model& model);
// The errors of the same before there is a sequence: whether prompts of this policy may be decoded so. `policy` is that
// of the request; one that leaves nothing out is OK.
absl::Status CheckSelectorBehind(std::string_view policy, const DecodeOptions& options, const Model& model);

}  // namespace spl::engine
