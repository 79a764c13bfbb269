// Three documents, and a prompt that has all of them between an instruction and a question.
#pragma once

#include <future>
#include <memory>
#include <random>
#include <vector>

#include "tests/services/engine/engines_fixture.h"

namespace spl::engine {

class StoredDocumentsTest : public EnginesTest {
 protected:
  void SetUp() override {
    store_ = std::make_shared<FakeStore>();
    options_.store = store_;
    std::mt19937 random(41);
    prompt_ = RandomPrompt(random, 20);
    for (const size_t length : {640, 700, 517}) {
      texts_.push_back(RandomPrompt(random, length));
      const auto begin = static_cast<int32_t>(prompt_.size());
      segments_.push_back({{begin, begin + static_cast<int32_t>(length)}, kDocs});
      prompt_.insert(prompt_.end(), texts_.back().begin(), texts_.back().end());
    }
    const auto question = RandomPrompt(random, 30);
    prompt_.insert(prompt_.end(), question.begin(), question.end());
  }

  // Each by itself, into the store.
  void PublishAll() {
    for (const auto& text : texts_) {
      std::promise<absl::Status> done;
      PublishRequest request;
      request.tokens = text;
      request.segments = {{{0, static_cast<int32_t>(text.size())}, kDocs}};
      request.on_done = [&](const absl::Status& status, const PublishOutcome&) { done.set_value(status); };
      ASSERT_TRUE(prefill_->Publish(std::move(request)).ok());
      const absl::Status status = done.get_future().get();
      ASSERT_TRUE(status.ok()) << status;
    }
  }
  // Each as a prompt of its own: into the store without summaries.
  void AskForEach() {
    for (const auto& text : texts_) {
      (void)Ask(
          text,
          [&](PrefillRequest& r) {
            r.segments = {{{0, static_cast<int32_t>(text.size())}, kDocs}};
          },
          1);
    }
    ASSERT_TRUE(store_->WaitForSize(30 + 28)) << "the segments, and the same text as prefixes in whole chunks";
  }

  std::shared_ptr<FakeStore> store_;
  PrefillEngineOptions options_;
  std::vector<int32_t> prompt_;
  std::vector<std::vector<int32_t>> texts_;
  std::vector<ReuseSpan> segments_;
};

}  // namespace spl::engine
