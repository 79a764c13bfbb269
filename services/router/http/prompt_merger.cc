#include "services/router/http/prompt_merger.h"

#include <utility>

namespace spl::router {

class PromptMerger::Part final : public GenerationSink {
 public:
  Part(std::shared_ptr<PromptMerger> merger, size_t prompt) : merger_(std::move(merger)), prompt_(prompt) {}

  void OnPrompt(uint32_t num_tokens, std::span<const TokenId> prompt) override {
    merger_->OnPrompt(num_tokens, prompt);
  }
  bool OnOutput(std::span<const Delta> deltas, const FinalInfo* final) override {
    return merger_->OnOutput(prompt_, deltas, final);
  }
  void OnError(const absl::Status& status) override { merger_->OnError(status); }

 private:
  const std::shared_ptr<PromptMerger> merger_;
  const size_t prompt_;
};

std::shared_ptr<GenerationSink> PromptMerger::SinkOf(size_t prompt) {
  return std::make_shared<Part>(shared_from_this(), prompt);
}

void PromptMerger::SetGenerations(std::vector<std::weak_ptr<Generation>> generations) {
  std::lock_guard lock(mutex_);
  generations_ = std::move(generations);
}

std::vector<std::weak_ptr<Generation>> PromptMerger::Generations() {
  std::lock_guard lock(mutex_);
  return generations_;
}

void PromptMerger::Cancel(const absl::Status& reason) {
  for (const auto& weak : Generations()) {
    if (const auto generation = weak.lock()) generation->Cancel(reason);
  }
}

void PromptMerger::Resume() {
  for (const auto& weak : Generations()) {
    if (const auto generation = weak.lock()) generation->Resume();
  }
}

void PromptMerger::OnPrompt(uint32_t num_tokens, std::span<const TokenId> prompt) {
  std::lock_guard lock(mutex_);
  prompt_tokens_ += num_tokens;
  sink_->OnPrompt(prompt_tokens_, prompt);
}

bool PromptMerger::OnOutput(size_t prompt, std::span<const Delta> deltas, const FinalInfo* final) {
  std::vector<Delta> shifted(deltas.begin(), deltas.end());
  for (Delta& delta : shifted) delta.index += static_cast<uint32_t>(prompt) * num_continuations_;
  std::lock_guard lock(mutex_);
  if (failed_) return true;
  if (final == nullptr) return sink_->OnOutput(shifted, nullptr);
  finals_[prompt] = *final;
  if (--num_open_ > 0) return sink_->OnOutput(shifted, nullptr);
  FinalInfo all = finals_.front();
  for (size_t i = 1; i < finals_.size(); ++i) {
    all.prompt_tokens += finals_[i].prompt_tokens;
    all.completion_tokens += finals_[i].completion_tokens;
    all.more_receipts.push_back(finals_[i].receipt);
  }
  return sink_->OnOutput(shifted, &all);
}

void PromptMerger::OnError(const absl::Status& status) {
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(failed_, true)) return;
    sink_->OnError(status);
  }
  Cancel(absl::CancelledError("another prompt of the request failed"));
}

}  // namespace spl::router
