#include "services/engine/cache/stream_classes.h"

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

std::shared_ptr<const StreamClasses> ServedClasses(const HeadClassMap& map) {
  auto classes = std::make_shared<StreamClasses>();
  for (int32_t layer = 0; layer < map.num_layers(); ++layer) {
    for (int32_t head = 0; head < map.num_kv_heads(); ++head)
      classes->push_back(layer < 2 ? HeadClass{} : map.at(layer, head));
  }
  return classes;
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
