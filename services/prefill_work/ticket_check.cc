#include "services/prefill_work/ticket_check.h"

#include <algorithm>

#include "services/base/status.h"

namespace spl::prefill {
namespace {

// Pages that are not in the ticket's holes. InvalidArgument: a hole where the request's classes keep something.
absl::StatusOr<int64_t> CountKept(const v1::Ticket& ticket, const engine::KvShape& shape, int64_t num_tokens,
                                  const engine::StreamClasses* classes) {
  const int64_t all = int64_t{shape.num_streams()} * engine::PagesFor(num_tokens);
  if (ticket.hole_begin().empty() && ticket.hole_end().empty()) return all;
  if (ticket.hole_begin_size() != shape.num_streams() || ticket.hole_end_size() != shape.num_streams())
    return InvalidArgument("the ticket has {} and {} ends of holes for {} head streams", ticket.hole_begin_size(),
                           ticket.hole_end_size(), shape.num_streams());
  if (classes == nullptr) return InvalidArgument("the ticket keeps less than the request's reuse policy needs");
  int64_t kept = all;
  for (int32_t s = 0; s < shape.num_streams(); ++s) {
    const uint32_t begin = ticket.hole_begin(s), end = ticket.hole_end(s);
    const engine::PageHole most = engine::HoleOf((*classes)[s], num_tokens);
    if (begin > end ||
        (begin < end && (begin < static_cast<uint32_t>(most.begin) || end > static_cast<uint32_t>(most.end))))
      return InvalidArgument(
          "the ticket does not keep pages [{}, {}) of layer {} head {}; its class leaves out [{}, {})", begin, end,
          s / shape.num_kv_heads, s % shape.num_kv_heads, most.begin, most.end);
    kept -= end - begin;
  }
  return kept;
}

absl::Status CheckSpares(const v1::Ticket& ticket, const engine::KvShape& shape) {
  uint64_t lists = 0;
  for (const uint32_t of_rank : ticket.spare_lists()) lists += of_rank;
  const int ranks = ticket.spare_lists_size();
  if (lists * ticket.pages_per_spare() != static_cast<uint64_t>(ticket.spare_page_ids_size()) ||
      (ranks > 0 && shape.num_kv_heads % ranks != 0) || lists > static_cast<uint64_t>(shape.num_streams()))
    return InvalidArgument("the ticket has {} spare pages in {} lists of {}, for {} ranks",
                           ticket.spare_page_ids_size(), lists, ticket.pages_per_spare(), ranks);
  const bool landing = !ticket.landing_page_ids().empty();
  if (ticket.spare_landing_page_ids_size() != (landing ? ticket.spare_page_ids_size() : 0))
    return InvalidArgument("the ticket has {} spare pages and {} spare landing pages", ticket.spare_page_ids_size(),
                           ticket.spare_landing_page_ids_size());
  // Restored heads fill their holes with them.
  for (int i = 0; i < ticket.hole_begin_size() && lists > 0; ++i) {
    if (ticket.hole_end(i) - ticket.hole_begin(i) > ticket.pages_per_spare())
      return InvalidArgument("the ticket's spare lists of {} pages do not fill a hole of {}", ticket.pages_per_spare(),
                             ticket.hole_end(i) - ticket.hole_begin(i));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateTicket(const v1::Ticket& ticket, const v1::DecodeEndpoint& endpoint, const engine::Model& model,
                            int64_t num_tokens, const engine::StreamClasses* classes) {
  const engine::KvShape shape = engine::KvShapeOf(model.config());
  const int64_t pages = engine::PagesFor(num_tokens);
  SPLICE_ASSIGN_OR_RETURN(int64_t kept, CountKept(ticket, shape, num_tokens, classes));
  kept -= int64_t{shape.num_streams()} * (ticket.held_tokens() / kernels::kPageTokens);
  if (ticket.num_layers() != static_cast<uint32_t>(shape.num_layers) ||
      ticket.num_kv_heads() != static_cast<uint32_t>(shape.num_kv_heads) || ticket.num_pages_per_stream() != pages ||
      ticket.page_ids_size() != kept)
    return InvalidArgument("the ticket has {} pages ({} layers, {} heads, {} each); a prompt of {} tokens needs {}",
                           ticket.page_ids_size(), ticket.num_layers(), ticket.num_kv_heads(),
                           ticket.num_pages_per_stream(), num_tokens, kept);
  SPLICE_RETURN_IF_ERROR(CheckSpares(ticket, shape));
  const uint64_t registered = (endpoint.pool_bytes() - endpoint.scratch_bytes()) / model.page_bytes();
  const uint64_t pool_pages =
      endpoint.device_handle().empty()
          ? registered
          : endpoint.device_pool_pages() * (1 + static_cast<uint64_t>(endpoint.more_device_handles_size()));
  for (const auto* ids : {&ticket.page_ids(), &ticket.spare_page_ids()}) {
    for (uint32_t page : *ids) {
      if (page >= pool_pages)
        return InvalidArgument("the ticket names page {}, the pool of '{}' has {}", page, endpoint.worker_id(),
                               pool_pages);
    }
  }
  if (!ticket.landing_page_ids().empty() && ticket.landing_page_ids_size() != ticket.page_ids_size())
    return InvalidArgument("the ticket has {} pages and {} landing pages", ticket.page_ids_size(),
                           ticket.landing_page_ids_size());
  for (const auto* ids : {&ticket.landing_page_ids(), &ticket.spare_landing_page_ids()}) {
    for (uint32_t page : *ids) {
      if (page >= registered)
        return InvalidArgument("the ticket names landing page {}, '{}' has {}", page, endpoint.worker_id(), registered);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckHeldTokens(const v1::Ticket& ticket, const engine::Model& model, const chunk::Digest& namespace_key,
                             std::span<const int32_t> tokens) {
  const uint32_t held = ticket.held_tokens();
  if (held == 0) return absl::OkStatus();
  if (held % kernels::kPageTokens != 0 || held >= tokens.size() || !ticket.hole_begin().empty() ||
      ticket.spare_page_ids_size() > 0)
    return InvalidArgument("the ticket holds {} of {} tokens, with {} holes", held, tokens.size(),
                           ticket.hole_begin_size());
  const chunk::ChunkKey last = chunk::MakePrefixKeys(model.kv_fingerprint(), namespace_key, tokens.first(held)).back();
  if (!std::equal(last.bytes.begin(), last.bytes.end(), ticket.held_key().begin(), ticket.held_key().end(),
                  [](uint8_t ours, char theirs) { return ours == static_cast<uint8_t>(theirs); }))
    return InvalidArgument("the decode worker holds KV of other text than the prompt's first {} tokens", held);
  return absl::OkStatus();
}

}  // namespace spl::prefill
