#include "services/engine/cache/stream_classes.h"

#include <xxhash.h>

#include <algorithm>
#include <limits>

#include "kernels/common/kv_pool.h"

namespace spl::engine {
namespace {

constexpr int64_t kPage = kernels::kPageTokens;

int64_t FirstOfWindow(const HeadClass& head, int64_t num_tokens) {
  return std::max<int64_t>(num_tokens - head.window, 0);
}

}  // namespace

StreamClasses::StreamClasses(std::vector<HeadClass> heads, bool of_one_sequence)
    : heads_(std::move(heads)), of_one_sequence_(of_one_sequence) {
  std::vector<int32_t> numbers;
  for (const HeadClass& head : heads_) {
    numbers.push_back(head.is_global ? -1 : head.window);
    numbers.push_back(head.is_global ? -1 : head.sinks);
  }
  key_ = XXH3_64bits(numbers.data(), numbers.size() * sizeof(int32_t)) | 1;
}

std::shared_ptr<const StreamClasses> WithRestored(std::shared_ptr<const StreamClasses> classes,
                                                  std::span<const int32_t> streams) {
  std::vector<HeadClass> heads(classes->begin(), classes->end());
  bool any = false;
  for (const int32_t stream : streams) {
    HeadClass& head = heads[stream];
    any |= !head.is_global;
    head = {};
  }
  if (!any) return classes;
  return std::make_shared<const StreamClasses>(std::move(heads), true);
}

std::shared_ptr<const StreamClasses> ServedClasses(const HeadClassMap& map) {
  std::vector<HeadClass> heads;
  for (int32_t layer = 0; layer < map.num_layers(); ++layer) {
    for (int32_t head = 0; head < map.num_kv_heads(); ++head) heads.push_back(map.served(layer, head));
  }
  return std::make_shared<const StreamClasses>(std::move(heads));
}

kernels::HeadVisibility VisibilityOf(const StreamClasses* classes, const ModelConfig& config, int32_t layer,
                                     int32_t kv_head) {
  const kernels::HeadVisibility own = config.visibility(layer);
  if (classes == nullptr) return own;
  return ClassVisibility((*classes)[layer * config.num_kv_heads + kv_head], own);
}

bool OfModel(const StreamClasses& classes, const ModelConfig& config) {
  return static_cast<int64_t>(classes.size()) == int64_t{config.num_layers} * config.num_kv_heads;
}

PageHole HoleOf(const HeadClass& head, int64_t num_tokens) {
  if (head.is_global) return {};
  const int64_t begin = (head.sinks + kPage - 1) / kPage, end = FirstOfWindow(head, num_tokens) / kPage;
  if (end <= begin) return {};
  return {static_cast<int32_t>(begin), static_cast<int32_t>(end)};
}

int64_t HoleLastsUntil(const HeadClass& head, int64_t num_tokens) {
  if (head.is_global) return std::numeric_limits<int64_t>::max();
  return (FirstOfWindow(head, num_tokens) / kPage + 1) * kPage + head.window - 1;
}

}  // namespace spl::engine
