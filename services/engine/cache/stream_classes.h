// Which pages of a head stream a sequence keeps: all of them, or of a local head those that later positions can still
// see, its sinks and its window (docs/methods/redknot.md).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "services/engine/model/head_classes.h"

namespace spl::engine {

// The class of every head stream of a sequence, [layer][kv_head]. Immutable.
class StreamClasses {
 public:
  // `of_one_sequence`: heads were restored for it.
  explicit StreamClasses(std::vector<HeadClass> heads, bool of_one_sequence = false);

  const HeadClass& operator[](size_t stream) const { return heads_[stream]; }
  size_t size() const { return heads_.size(); }
  auto begin() const { return heads_.begin(); }
  auto end() const { return heads_.end(); }
  bool of_one_sequence() const { return of_one_sequence_; }
  // Follows from the classes: equal lists have equal keys, others (but for one pair in 2^64) different ones. Never 0.
  uint64_t key() const { return key_; }

 private:
  std::vector<HeadClass> heads_;
  bool of_one_sequence_;
  uint64_t key_;
};

// HeadClassMap::served of every stream.
std::shared_ptr<const StreamClasses> ServedClasses(const HeadClassMap& map);

// The same but for these heads (numbers of streams, in any order), which are global; `classes` itself where none is
// local.
std::shared_ptr<const StreamClasses> WithRestored(std::shared_ptr<const StreamClasses> classes,
                                                  std::span<const int32_t> streams);

// What a query of this head sees, of what its layer lets it see; everything of that without classes (null).
// REQUIRES: classes of this model (OfModel).
kernels::HeadVisibility VisibilityOf(const StreamClasses* classes, const ModelConfig& config, int32_t layer,
                                     int32_t kv_head);
// A class for each head stream of the model?
bool OfModel(const StreamClasses& classes, const ModelConfig& config);

// Pages [begin, end) of a stream that are not kept.
struct PageHole {
  int32_t begin = 0;
  int32_t end = 0;
  int32_t size() const { return end - begin; }
  bool operator==(const PageHole&) const = default;
};

// The hole of a head in a sequence of `num_tokens` positions: the last of them, num_tokens - 1, and whatever follows
// sees nothing in it. Empty: {0, 0}. At most ceil(sinks / 64) pages stand in front of it and ceil(window / 64) + 1
// behind it.
PageHole HoleOf(const HeadClass& head, int64_t num_tokens);
// The largest number of tokens with that same hole.
int64_t HoleLastsUntil(const HeadClass& head, int64_t num_tokens);

}  // namespace spl::engine
