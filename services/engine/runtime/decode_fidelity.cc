#include "services/engine/runtime/decode_fidelity.h"

#include <algorithm>
#include <utility>

#include "services/base/status.h"
#include "services/engine/methods/selection_methods.h"

namespace spl::engine {
namespace {

// Whether the last step attended to less than everything: a context that is still short is not chosen from.
bool Chose(TokenSelector& selector) {
  if (selector.scoring().scoring == TokenScoring::kNone && selector.of_prompt() == nullptr) return true;
  const auto layers = selector.layers();
  return std::any_of(layers.begin(), layers.end(),
                     [](const kernels::LayerSelection& s) { return s.selects || s.listed; });
}

double MeanKept(const MassProbe& mass) {
  double sum = 0;
  int64_t count = 0;
  for (const float kept : mass.kept) {
    if (kept < 0) continue;
    sum += double{kept};
    ++count;
  }
  return count > 0 ? sum / static_cast<double>(count) : 1;
}

}  // namespace

std::unique_ptr<WatchedSequence> DecodeFidelity::Draw(const TokenSelector& selector,
                                                      std::shared_ptr<const StreamClasses> classes) {
  if (options_.share <= 0 || std::uniform_real_distribution<>(0, 1)(random_) >= options_.share) return nullptr;
  auto everything = MakeTokenSelector("auto", model_.config(), std::move(classes));
  if (!everything.ok() || (*everything)->name() == selector.name()) return nullptr;
  auto watched = std::make_unique<WatchedSequence>();
  watched->everything = *std::move(everything);
  watched->mass.everything = watched->everything.get();
  watched->mass.kept.resize(model_.config().num_layers * model_.config().num_qo_heads);
  return watched;
}

absl::Status DecodeFidelity::BeforeStep(ParallelExecutor& executor, std::span<DecodeRow> rows,
                                        std::span<WatchedSequence* const> watched) {
  compared_.clear();
  std::vector<DecodeRow> over_everything;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (watched[i] == nullptr || ++watched[i]->steps % options_.interval != 0) continue;
    compared_.push_back(i);
    over_everything.push_back({rows[i].token, rows[i].kv, watched[i]->everything.get()});
    rows[i].mass = &watched[i]->mass;
  }
  if (compared_.empty()) return absl::OkStatus();
  SPLICE_RETURN_IF_ERROR(executor.Decode(over_everything));
  SPLICE_ASSIGN_OR_RETURN(const std::span<float> logits, executor.Logits());
  logits_.assign(logits.begin(), logits.end());
  return absl::OkStatus();
}

absl::Status DecodeFidelity::AfterStep(ParallelExecutor& executor, std::span<const DecodeRow> rows) {
  if (compared_.empty()) return absl::OkStatus();
  SPLICE_ASSIGN_OR_RETURN(const std::span<float> logits, executor.Logits());
  const auto vocab = static_cast<size_t>(model_.config().vocab_size);
  for (size_t i = 0; i < compared_.size(); ++i) {
    TokenSelector& selector = *rows[compared_[i]].selector;
    if (!Chose(selector)) continue;
    options_.report(selector.name(),
                    CompareLogits(logits.subspan(compared_[i] * vocab, vocab),
                                  std::span<const float>(logits_).subspan(i * vocab, vocab)),
                    MeanKept(*rows[compared_[i]].mass));
  }
  return absl::OkStatus();
}

}  // namespace spl::engine
