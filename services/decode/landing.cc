#include "services/decode/landing.h"

#include <span>
#include <string_view>
#include <vector>

#include "kernels/kv_copy/crc32c_shifter.h"
#include "services/base/fault_point.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "services/engine/cache/spare_pages.h"

namespace spl::decode {
namespace {

FaultPoint landing_fault("decode.land");

// The pages that were sent beside the others become part of the sequence; the rest of the spare ones is free again.
absl::Status RestoreHeads(Ticket& ticket, const v1::CommitRequest& request) {
  const auto spare = std::move(ticket.spare), landing_spare = std::move(ticket.landing_spare);
  // A ticket without classes keeps everything: no head lacks anything (ReuseOptions.full_kv).
  if (request.restored_heads().empty() || ticket.classes == nullptr) return absl::OkStatus();
  const std::vector<int32_t> restored(request.restored_heads().begin(), request.restored_heads().end());
  const bool compressed = ticket.kv->classes() != nullptr;
  const engine::KvShape& shape = ticket.kv->shape();
  std::vector<int32_t> lists_of_rank;
  if (compressed) lists_of_rank = spare->need().lists_of_rank;
  // Without holes there is nothing that a head could lack.
  SPLICE_ASSIGN_OR_RETURN(
      const std::vector<int32_t> lists,
      engine::AssignSpares(shape, *ticket.classes, compressed ? ticket.prompt_tokens : 0, lists_of_rank, restored));
  for (size_t i = 0; i < restored.size() && compressed; ++i) {
    const int32_t hole = ticket.kv->hole(restored[i]).size();
    ticket.kv->Restore(restored[i], lists[i] < 0 ? std::vector<int32_t>() : spare->Take(lists[i], hole));
    if (ticket.landing == nullptr) continue;
    ticket.landing->Restore(restored[i], lists[i] < 0 ? std::vector<int32_t>() : landing_spare->Take(lists[i], hole));
  }
  ticket.classes = engine::WithRestored(ticket.classes, restored);
  return absl::OkStatus();
}

absl::StatusOr<engine::PositionRanges> RangesOf(const v1::KeptPositions& positions, std::string_view what) {
  if (positions.bounds_size() % 2 != 0)
    return InvalidArgument("commit: {} has {} bounds, a range takes two", what, positions.bounds_size());
  engine::PositionRanges ranges;
  for (int i = 0; i < positions.bounds_size(); i += 2)
    ranges.push_back({static_cast<int32_t>(positions.bounds(i)), static_cast<int32_t>(positions.bounds(i + 1))});
  return ranges;
}

// Null: everything is kept.
absl::StatusOr<std::shared_ptr<const engine::KeptTokens>> KeptTokensOf(const v1::CommitRequest& request,
                                                                       int64_t prompt_tokens,
                                                                       const engine::ModelConfig& config) {
  if (request.kept().empty()) return nullptr;
  engine::KeptTokens kept{static_cast<int32_t>(prompt_tokens), {}};
  for (const v1::KeptPositions& positions : request.kept()) {
    const std::string what = fmt::format("layer {} of kept", kept.layers.size());
    SPLICE_ASSIGN_OR_RETURN(kept.layers.emplace_back(), RangesOf(positions, what));
  }
  SPLICE_RETURN_IF_ERROR(engine::ValidateKeptTokens(kept, config.num_layers, prompt_tokens));
  return std::make_shared<const engine::KeptTokens>(std::move(kept));
}

// The KV is of a shorter prompt than was reserved: the ticket is for that one from here on.
absl::Status Shorten(Ticket& ticket, const v1::CommitRequest& request) {
  if (!request.has_only()) return absl::OkStatus();
  engine::KeptTokens only{static_cast<int32_t>(ticket.prompt_tokens), {}};
  SPLICE_ASSIGN_OR_RETURN(only.layers.emplace_back(), RangesOf(request.only(), "only"));
  SPLICE_RETURN_IF_ERROR(engine::ValidateKeptTokens(only, 1, ticket.prompt_tokens));
  if (ticket.classes != nullptr || !request.kept().empty() || ticket.held_pages > 0)
    return InvalidArgument("commit of a shorter prompt with {}", ticket.classes != nullptr ? "head classes"
                                                                 : ticket.held_pages > 0   ? "held pages"
                                                                                           : "kept tokens");
  ticket.conversation.reset();  // its keys are those of the whole prompt
  const int64_t left = engine::CountOf(only.layers[0]);
  for (engine::SequenceKv* const kv : {ticket.kv.get(), ticket.landing.get()}) {
    if (kv != nullptr) kv->Truncate(left);
  }
  if (!ticket.prompt.empty()) {
    const auto input_end = static_cast<int32_t>(ticket.prompt_tokens - ticket.num_output_tokens);
    const engine::PositionRange input{0, input_end};
    for (const engine::PositionRange& range : engine::IntersectionOf(only.layers[0], {&input, 1}))
      ticket.left_prompt.insert(ticket.left_prompt.end(), ticket.prompt.begin() + range.begin,
                                ticket.prompt.begin() + range.end);
  }
  ticket.prompt_tokens = left;
  return absl::OkStatus();
}

// The prompt in the pages in which it was computed.
absl::Status TakeInPlace(Ticket& ticket, const v1::CommitRequest& request, const ReservationPools& pools) {
  if (!ticket.in_place && !request.in_place()) return absl::OkStatus();
  const auto given = ticket.in_place ? pools.shared.Take(ticket.id) : nullptr;
  if (given == nullptr || !request.in_place())
    return InvalidArgument("commit of a ticket that is{} in place, and {} was handed over in this process",
                           ticket.in_place ? "" : " not", given == nullptr ? "nothing" : "its KV");
  ticket.kv = given->Continue();
  return absl::OkStatus();
}

// Gives back the pages of positions that were not sent, before anything is checked.
absl::Status KeepOnly(Ticket& ticket, const v1::CommitRequest& request, const engine::ModelConfig& config) {
  ticket.kv->set_num_tokens(ticket.prompt_tokens);
  SPLICE_ASSIGN_OR_RETURN(const auto kept, KeptTokensOf(request, ticket.prompt_tokens, config));
  if (kept == nullptr) return absl::OkStatus();
  if (ticket.classes != nullptr || ticket.held_pages > 0)
    return InvalidArgument("commit of kept tokens for a ticket with {}",
                           ticket.classes != nullptr ? "head classes" : "held pages");
  ticket.kv->KeepOnly(kept);
  if (ticket.landing == nullptr) return absl::OkStatus();
  ticket.landing->set_num_tokens(ticket.prompt_tokens);
  ticket.landing->KeepOnly(kept);
  return absl::OkStatus();
}

// For tests of the checksums.
absl::Status FlipAByte(const engine::SequenceKv& kv, int32_t page_idx) {
  const int32_t page = kv.stream(0, 0)[static_cast<size_t>(page_idx)];
  std::vector<std::byte> bytes(kv.pool().view().page_bytes());
  SPLICE_RETURN_IF_ERROR(kv.pool().ReadPages({&page, 1}, bytes.data()));
  bytes[0] ^= std::byte{1};
  return kv.pool().WritePages({&page, 1}, bytes.data());
}

// The checksum of each head stream's sent pages against the writer's. `pages`: Ticket::SentPages.
absl::Status Verify(const Ticket& ticket, const v1::CommitRequest& request, const std::vector<int32_t>& pages,
                    engine::PagePool& pool, bool& damaged) {
  const engine::SequenceKv& kv = *ticket.kv;
  const engine::KvShape& shape = kv.shape();
  std::vector<uint32_t> crcs(pages.size());
  SPLICE_RETURN_IF_ERROR(pool.ChecksumPages(pages, crcs.data()));
  const kernels::Crc32cShifter over_a_page(pool.view().page_bytes());
  auto next = crcs.begin();
  for (int32_t stream = 0; stream < shape.num_streams(); ++stream) {
    uint32_t crc = 0;
    for (const int32_t page : std::span(kv.streams()[stream]).subspan(static_cast<size_t>(ticket.held_pages))) {
      if (page != kernels::kNoPage) crc = over_a_page(crc) ^ *next++;
    }
    if (crc == request.crc32c(stream)) continue;
    damaged = true;
    // Do not tell the writer the right checksum: with it, a process could commit pages that another one has filled.
    log::Warning("decode.kv_damaged", log::F("request", ticket.request_id), log::F("stream", stream),
                 log::F("checksum", fmt::format("{:08x}", crc)),
                 log::F("sent", fmt::format("{:08x}", request.crc32c(stream))));
    return Errorf(absl::StatusCode::kDataLoss,
                  "the KV of layer {} head {} arrived damaged: its checksum is another one",
                  stream / shape.num_kv_heads, stream % shape.num_kv_heads);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status LandPrompt(Ticket& ticket, const v1::CommitRequest& request, const ReservationPools& pools,
                        const engine::Model& model, bool& damaged) {
  SPLICE_RETURN_IF_ERROR(TakeInPlace(ticket, request, pools));
  SPLICE_RETURN_IF_ERROR(Shorten(ticket, request));
  const int32_t num_streams = ticket.kv->shape().num_streams();
  if (request.num_tokens() != ticket.prompt_tokens)
    return InvalidArgument("commit of {} tokens, {} were reserved", request.num_tokens(), ticket.prompt_tokens);
  if (!ticket.in_place && request.crc32c_size() != num_streams)
    return InvalidArgument("commit has {} checksums, {} are needed", request.crc32c_size(), num_streams);
  if (request.in_landing_pages() && ticket.landing == nullptr)
    return InvalidArgument("commit of landing pages, the ticket has none");
  SPLICE_RETURN_IF_ERROR(RestoreHeads(ticket, request));
  SPLICE_RETURN_IF_ERROR(KeepOnly(ticket, request, model.config()));
  const FaultOutcome fault = landing_fault.Hit();
  SPLICE_RETURN_IF_ERROR(fault.status);
  if (ticket.in_place) return absl::OkStatus();  // nothing was moved that could have been damaged
  if (fault.corrupt)
    SPLICE_RETURN_IF_ERROR(request.in_landing_pages() ? FlipAByte(*ticket.landing, 0)
                                                      : FlipAByte(*ticket.kv, ticket.held_pages));
  // Pages that landed on the host go on first: where they end is where they are checked, and faster than on the host.
  const std::vector<int32_t> pages = ticket.SentPages();
  if (request.in_landing_pages()) {
    std::vector<const std::byte*> from;
    from.reserve(pages.size());
    for (const int32_t page : ticket.landing->AllPages()) from.push_back(pools.landing->view().k(page));
    SPLICE_RETURN_IF_ERROR(pools.pool().WritePagesFrom(pages, from));
  }
  SPLICE_RETURN_IF_ERROR(Verify(ticket, request, pages, pools.pool(), damaged));
  ticket.landing.reset();
  return absl::OkStatus();
}

}  // namespace spl::decode
