// The pages that a sequence keeps of a head stream: all of a global head; of a local head those that later positions
// can still see, its sinks and its window (docs/methods/redknot.md).
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
  // `of_one_sequence`: heads were restored for one sequence, which alone has these classes.
  explicit StreamClasses(std::vector<HeadClass> heads, bool of_one_sequence = false);

  const HeadClass& operator[](size_t stream) const { return heads_[stream]; }
  size_t size() const { return heads_.size(); }
  auto begin() const { return heads_.begin(); }
  auto end() const { return heads_.end(); }
  bool of_one_sequence() const { return of_one_sequence_; }
  // A hash of the classes: equal lists have equal keys, different lists (except for one pair in 2^64) different keys.
  // Never 0.
  uint64_t key() const { return key_; }

 private:
  std::vector<HeadClass> heads_;
  bool of_one_sequence_;
  uint64_t key_;
};

// The class HeadClassMap::served of every stream.
std::shared_ptr<const StreamClasses> ServedClasses(const HeadClassMap& map);

// The same classes, except that these heads (stream numbers, in any order) are global; `classes` itself if none of them
// is local.
std::shared_ptr<const StreamClasses> WithRestored(std::shared_ptr<const StreamClasses> classes,
                                                  std::span<const int32_t> streams);

// Visibility of this head: its class, inside of its layer's own visibility. REQUIRES: classes of this model (OfModel).
// `classes` null: the layer's own visibility.
kernels::HeadVisibility VisibilityOf(const StreamClasses* classes, const ModelConfig& config, int32_t layer,
                                     int32_t kv_head);
// True if there is a class for each head stream of the model.
bool OfModel(const StreamClasses& classes, const ModelConfig& config);

// A hole: pages [begin, end) of a stream that are not kept.
struct PageHole {
  int32_t begin = 0;
  int32_t end = 0;
  int32_t size() const { return end - begin; }
  bool operator==(const PageHole&) const = default;
};

// The hole of a head in a sequence of `num_tokens` positions: position num_tokens - 1 and all later ones see nothing in
// it. At most ceil(sinks / 64) pages are in front of it, and at most ceil(window / 64) + 1 behind it. {0, 0}: there is
// none.
PageHole HoleOf(const HeadClass& head, int64_t num_tokens);
// The largest number of tokens with the same hole as `num_tokens`.
int64_t HoleLastsUntil(const HeadClass& head, int64_t num_tokens);

}  // namespace spl::engine
