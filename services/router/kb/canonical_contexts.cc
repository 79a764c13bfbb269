#include "services/router/kb/canonical_contexts.h"

namespace spl::router {

std::vector<std::vector<size_t>> SeparateContexts(size_t num_documents) {
  std::vector<std::vector<size_t>> contexts(num_documents);
  for (size_t i = 0; i < num_documents; ++i) contexts[i].push_back(i);
  return contexts;
}

std::vector<std::vector<size_t>> PackContexts(std::span<const uint64_t> lengths, uint64_t prefix, uint64_t limit) {
  std::vector<std::vector<size_t>> contexts;
  uint64_t used = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    if (contexts.empty() || used + lengths[i] > limit) {
      contexts.emplace_back();
      used = prefix;
    }
    contexts.back().push_back(i);
    used += lengths[i];
  }
  return contexts;
}

}  // namespace spl::router
