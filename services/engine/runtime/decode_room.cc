#include "services/engine/runtime/decode_room.h"

#include "services/base/check.h"
#include "services/engine/methods/selection_methods.h"
#include "services/engine/runtime/local_generator.h"

namespace spl::engine {

std::vector<int64_t> PagesToStart(const DecodeSequence& sequence, const Model& model, const PagePool& pool) {
  const DecodeRequest& request = sequence.request;
  const KvShape shape = KvShapeOf(model.config());
  const int num_ranks = pool.view().num_ranks();
  const int64_t num_tokens = request.kv->num_tokens(), copies = request.sampling.num_forks - 1;
  const bool copies_pages = num_tokens % kernels::kPageTokens != 0;
  std::vector<int64_t> needed(static_cast<size_t>(num_ranks),
                              copies_pages ? copies * shape.num_streams() / num_ranks : 0);
  const auto selector = MakeSelectorFor(*request.kv, request.decode, model);
  SPLICE_CHECK(selector.ok(), "a selector that Submit has checked");
  if (const auto compact = CompactNeedsOf(**selector, model, num_tokens); compact.has_value()) {
    const auto of_fork = CompactPages::PagesByRank(shape, *compact, num_ranks, num_tokens + 1);
    for (size_t r = 0; r < needed.size(); ++r)
      needed[r] += of_fork[r] * (copies + (request.compact == nullptr ? 1 : 0));
  }
  return needed;
}

}  // namespace spl::engine
