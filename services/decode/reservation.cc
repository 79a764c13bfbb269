#include "services/decode/reservation.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "services/base/status.h"
#include "services/decode/leave_out.h"
#include "services/engine/engine.h"
#include "services/engine/methods/recovery_methods.h"
#include "services/engine/methods/selection_methods.h"
#include "services/engine/selection/prompt_selector.h"
#include "services/methods/methods.h"
#include "services/wire/convert.h"

namespace spl::decode {
namespace {

int64_t Sum(const std::vector<int64_t>& counts) { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

// Room that a prompt takes.
struct Room {
  bool compressed = false;       // only the KV that the classes keep, and the spares
  engine::SpareNeed spares;      // none unless compressed
  std::vector<int64_t> of_rank;  // pages
};

// Reserves only the KV that local heads keep, if that (with the room for restored heads until the commit) is less than
// everything. `share`: share of the local heads that may be restored.
Room RoomFor(const engine::KvShape& shape, const engine::StreamClasses* classes, int num_ranks, int64_t num_tokens,
             double share) {
  Room room{.of_rank = engine::PagesByRank(shape, nullptr, num_ranks, num_tokens)};
  if (classes == nullptr) return room;
  Room less{true, engine::SparesFor(shape, *classes, num_ranks, num_tokens, share),
            engine::PagesByRank(shape, classes, num_ranks, num_tokens)};
  for (size_t r = 0; r < less.of_rank.size(); ++r)
    less.of_rank[r] += int64_t{less.spares.lists_of_rank[r]} * less.spares.pages_per_list;
  return Sum(less.of_rank) < Sum(room.of_rank) ? less : room;
}

// Landing pages for all that may be sent, or none at all: a GPU of this host can still write the pool.
void ReserveLanding(engine::PagePool& pool, const engine::SpareNeed& spares, Ticket& ticket) {
  auto landing = std::make_unique<engine::SequenceKv>(pool, ticket.kv->shape(), ticket.kv->classes());
  if (!landing->Reserve(ticket.prompt_tokens - int64_t{ticket.held_pages} * kernels::kPageTokens).ok()) return;
  if (ticket.spare != nullptr) {
    auto spare = engine::SparePages::Reserve(pool, spares);
    if (!spare.ok()) return;
    ticket.landing_spare = *std::move(spare);
  }
  ticket.landing = std::move(landing);
}

void DescribeHoles(const Ticket& ticket, const engine::SpareNeed& spares, v1::Ticket& response) {
  for (int32_t stream = 0; stream < ticket.kv->shape().num_streams(); ++stream) {
    response.add_hole_begin(static_cast<uint32_t>(ticket.kv->hole(stream).begin));
    response.add_hole_end(static_cast<uint32_t>(ticket.kv->hole(stream).end));
  }
  response.mutable_spare_lists()->Assign(spares.lists_of_rank.begin(), spares.lists_of_rank.end());
  response.set_pages_per_spare(static_cast<uint32_t>(spares.pages_per_list));
  const auto pages = ticket.spare->pages();
  response.mutable_spare_page_ids()->Assign(pages.begin(), pages.end());
  if (ticket.landing_spare == nullptr) return;
  const auto landing = ticket.landing_spare->pages();
  response.mutable_spare_landing_page_ids()->Assign(landing.begin(), landing.end());
}

// A ticket without pages, once each field of the request is known to be one that the model and the engine take.
absl::StatusOr<std::unique_ptr<Ticket>> ReadRequest(const v1::ReserveRequest& request,
                                                    const engine::ReuseOptions& reuse, const engine::Model& model) {
  const engine::ModelConfig& config = model.config();
  auto ticket = std::make_unique<Ticket>();
  ticket->sampling = wire::FromProto(request.sampling());
  SPLICE_RETURN_IF_ERROR(engine::ValidateSampling(ticket->sampling, config.vocab_size));
  SPLICE_ASSIGN_OR_RETURN(ticket->classes, wire::DecodeClassesOf(reuse, model));
  SPLICE_RETURN_IF_ERROR(engine::CheckRecoveryPolicy(reuse, config, model.head_classes().get()));
  ticket->decode = wire::DecodeOptionsOf(request.reuse());
  const int64_t tokens = request.prompt_tokens(), replayed = request.replay_token_ids_size();
  if (tokens < 1 || tokens + replayed >= config.max_positions)
    return InvalidArgument("the prompt has {} tokens; the model's context is {}", tokens + replayed,
                           config.max_positions);
  if (request.num_output_tokens() >= tokens || (!request.token_ids().empty() && request.token_ids_size() != tokens))
    return InvalidArgument("prompt_tokens is {}, num_output_tokens {}, token_ids {}", tokens,
                           request.num_output_tokens(), request.token_ids_size());
  if (replayed > 0 && (ticket->sampling.num_forks != 1 || request.num_output_tokens() > 0))
    return InvalidArgument("{} replay_token_ids with n = {} and num_output_tokens {}", replayed,
                           ticket->sampling.num_forks, request.num_output_tokens());
  ticket->prompt_tokens = tokens;
  ticket->num_output_tokens = request.num_output_tokens();
  ticket->prompt.assign(request.token_ids().begin(), request.token_ids().end());
  SPLICE_RETURN_IF_ERROR(engine::ValidateTokens(ticket->prompt, config, "prompt token"));
  ticket->replay.assign(request.replay_token_ids().begin(), request.replay_token_ids().end());
  SPLICE_RETURN_IF_ERROR(engine::ValidateTokens(ticket->replay, config, "token to replay"));
  return ticket;
}

// The selector whose pages are reserved, and how many pages of each rank that is with all others.
struct Choice {
  engine::DecodeOptions options;
  std::unique_ptr<engine::TokenSelector> selector;
  std::vector<int64_t> needed;
  int64_t to_choose = 0;    // pages of each rank that the choice takes on top, and gives back before the first step
  bool falls_back = false;  // to everything, for want of room
};

// Finds and makes room in the pool for one ticket.
struct PoolRoom {
  engine::SharedPool& shared;
  std::unique_ptr<engine::SequenceKv> held;  // pages that the ticket need not take; null: none
  bool in_place = false;

  int64_t num_held() const { return held == nullptr ? 0 : held->num_pages(); }
  // Whether the pool has `needed` pages [rank] for the ticket, held ones included. Cached KV gives way. In place
  // nothing is reserved: the pool must be large enough.
  bool Fits(std::vector<int64_t> needed) const {
    const engine::KvPartitions& pool = shared.pool().view();
    if (in_place) return *std::max_element(needed.begin(), needed.end()) <= pool.pages_per_rank();
    for (int64_t& pages : needed) pages -= num_held() / pool.num_ranks();
    return shared.MakeRoom(needed);
  }
};

int64_t Most(const std::vector<int64_t>& pages) { return *std::max_element(pages.begin(), pages.end()); }

// A selector that chooses by the prompt's last rows runs them again, over pages of their own (PromptChoice).
int64_t PagesToChoose(engine::TokenSelector& selector, const engine::KvShape& shape, int num_ranks, int64_t tokens) {
  const engine::PromptSelector* const chooser = selector.of_prompt();
  if (chooser == nullptr || !chooser->chooses_of(tokens)) return 0;
  const int64_t first = std::max<int64_t>(0, chooser->first_row(tokens));
  return (engine::PagesFor(tokens) - first / kernels::kPageTokens) * (shape.num_streams() / num_ranks);
}

// REQUIRES: the ticket is read. `without`: pages of all but a choice of tokens.
absl::StatusOr<Choice> ChooseSelector(const Ticket& ticket, const engine::ReuseOptions& reuse,
                                      const engine::Model& model, const PoolRoom& place,
                                      const std::vector<int64_t>& without) {
  const engine::PagePool& pool = place.shared.pool();
  const engine::KvShape shape = engine::KvShapeOf(model.config());
  // The policy's omissions are not known yet: reserves room for everything.
  const auto choice_of = [&](const engine::DecodeOptions& options) -> absl::StatusOr<Choice> {
    Choice choice{.options = options, .needed = without};
    SPLICE_ASSIGN_OR_RETURN(choice.selector, engine::MakeSelectorBehind(reuse.policy, ticket.prompt_tokens, options,
                                                                        model, ticket.classes));
    choice.to_choose = PagesToChoose(*choice.selector, shape, pool.view().num_ranks(), ticket.prompt_tokens);
    const auto compact = engine::CompactNeedsOf(*choice.selector, model, ticket.prompt_tokens);
    if (!compact.has_value()) return choice;
    const auto more =
        engine::CompactPages::PagesByRank(shape, *compact, pool.view().num_ranks(), ticket.prompt_tokens + 1);
    for (size_t r = 0; r < more.size(); ++r) choice.needed[r] += more[r] * ticket.sampling.num_forks;
    return choice;
  };
  // Where tokens may be left out, the keys that score are of the kind that serves lists, whatever is left out in the
  // end.
  engine::DecodeOptions own = ticket.decode;
  const methods::Policy* const policy = methods::FindPolicy(reuse.policy);
  if (policy != nullptr && policy->leaves_out_tokens && own.dims < 0) own.dims = engine::kCompactDims;
  SPLICE_ASSIGN_OR_RETURN(Choice wanted, choice_of(own));
  // The pages of the choice may become free later; a pool that is too small for them stays so.
  const bool too_large = Most(wanted.needed) + wanted.to_choose > pool.view().pages_per_rank();
  if (!too_large && place.Fits(wanted.needed)) return wanted;
  engine::DecodeOptions dense = ticket.decode;
  dense.selector = methods::ResolveSelector(methods::kAuto, ticket.classes != nullptr);
  SPLICE_ASSIGN_OR_RETURN(Choice everything, choice_of(dense));
  everything.falls_back =
      Most(everything.needed) < Most(wanted.needed) + wanted.to_choose && (place.Fits(everything.needed) || too_large);
  return everything.falls_back ? std::move(everything) : std::move(wanted);
}

// Some samplers and selectors read the prompt.
absl::Status CheckPrompt(const Ticket& ticket, engine::TokenSelector& selector) {
  const bool reads_prompt =
      ticket.sampling.needs_prompt() || selector.of_prompt() != nullptr || ticket.num_output_tokens > 0;
  if (!reads_prompt || !ticket.prompt.empty()) return absl::OkStatus();
  return InvalidArgument(
      "token_ids is empty, but a repetition penalty, earlier output or the decode selector '{}' needs them",
      selector.name());
}

void DescribePages(const Ticket& ticket, v1::Ticket& response) {
  const std::vector<int32_t> pages = ticket.SentPages();
  response.mutable_page_ids()->Assign(pages.begin(), pages.end());
  if (ticket.landing != nullptr) {
    const std::vector<int32_t> landing = ticket.landing->AllPages();
    response.mutable_landing_page_ids()->Assign(landing.begin(), landing.end());
  }
  response.set_num_pages_per_stream(static_cast<uint32_t>(ticket.kv->num_pages_per_stream()));
  response.set_held_tokens(static_cast<uint32_t>(ticket.held_pages * kernels::kPageTokens));
  if (ticket.held_pages > 0) {
    const chunk::ChunkKey& last = ticket.conversation->blocks[static_cast<size_t>(ticket.held_pages) - 1];
    response.set_held_key(wire::ToBytes(last.bytes));
  }
  response.set_num_layers(static_cast<uint32_t>(ticket.kv->shape().num_layers));
  response.set_num_kv_heads(static_cast<uint32_t>(ticket.kv->shape().num_kv_heads));
}

// With the pages that are kept of the prompt, if its writer does not send them. Owns them: they are not evicted to make
// room for the rest.
PoolRoom PlaceOf(const v1::ReserveRequest& request, const ReservationPools& pools, Ticket& ticket) {
  PoolRoom place{.shared = pools.shared, .held = nullptr, .in_place = ticket.in_place};
  if (!ticket.conversation.has_value() || !request.writer().skips_held() || ticket.in_place) return place;
  const engine::SessionTable::Match kept = pools.kept->Find(*ticket.conversation, ticket.prompt_tokens);
  if (kept.num_pages == 0) return place;
  place.held = std::make_unique<engine::SequenceKv>(pools.pool(), kept.kv->shape());
  place.held->AppendLeading(*kept.kv, kept.num_pages);
  ticket.held_pages = kept.num_pages;
  return place;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Ticket>> MakeReservation(const v1::ReserveRequest& request, const engine::Model& model,
                                                        const ReservationPools& pools, v1::Ticket& response) {
  engine::PagePool& pool = pools.pool();
  const engine::KvShape shape = engine::KvShapeOf(model.config());
  const engine::ReuseOptions reuse = wire::FromProto(request.reuse());
  SPLICE_ASSIGN_OR_RETURN(auto ticket, ReadRequest(request, reuse, model));
  ticket->in_place = request.writer().epoch() != 0 && request.writer().epoch() == pools.shared.writer_epoch();
  if (!ticket->in_place && pools.shared.PromptsWait())
    return absl::ResourceExhaustedError("prompts that this worker computes itself wait for KV pages");
  if (pools.kept != nullptr && ticket->classes == nullptr) {
    SPLICE_ASSIGN_OR_RETURN(ticket->conversation, ReadConversation(request));
  }
  const int64_t tokens = ticket->prompt_tokens;
  const int num_ranks = pool.view().num_ranks();
  const bool leave_out = ticket->classes != nullptr && !ticket->in_place &&
                         LeavingOutPays(*ticket->classes, tokens, pool.view().page_bytes(),
                                        {request.kv_bytes_per_s(), request.kv_write_seconds()});
  const Room room = RoomFor(shape, leave_out ? ticket->classes.get() : nullptr, num_ranks, tokens, reuse.restore_share);
  // Growth pages per stream and fork on top: a sequence that could not take its first step is not let in.
  std::vector<int64_t> without = room.of_rank;
  const int64_t growth = 1 + static_cast<int64_t>(ticket->replay.size()) / kernels::kPageTokens;
  for (int64_t& pages : without) pages += growth * (shape.num_streams() / num_ranks) * ticket->sampling.num_forks;
  PoolRoom place = PlaceOf(request, pools, *ticket);
  SPLICE_ASSIGN_OR_RETURN(const Choice choice, ChooseSelector(*ticket, reuse, model, place, without));
  ticket->decode = choice.options;
  if (choice.falls_back) response.set_decode_selector(choice.options.selector);
  SPLICE_RETURN_IF_ERROR(CheckPrompt(*ticket, *choice.selector));
  if (Most(choice.needed) > pool.view().pages_per_rank())
    return InvalidArgument("the prompt of {} tokens with n = {} needs {} KV pages; the decode worker's pool has {}",
                           tokens, ticket->sampling.num_forks, Sum(choice.needed), pool.num_pages());
  if (ticket->in_place) {
    response.set_in_place(true);
    return ticket;
  }
  if (!place.Fits(choice.needed))
    return Errorf(absl::StatusCode::kResourceExhausted, "{} KV pages are needed, {} of {} are available",
                  Sum(choice.needed) - place.num_held(), pool.num_available(), pool.num_pages());
  ticket->kv = std::move(place.held);  // without classes
  if (ticket->kv == nullptr)
    ticket->kv = std::make_unique<engine::SequenceKv>(pool, shape, room.compressed ? ticket->classes : nullptr);
  SPLICE_RETURN_IF_ERROR(ticket->kv->Reserve(tokens));
  if (room.compressed) {
    SPLICE_ASSIGN_OR_RETURN(ticket->spare, engine::SparePages::Reserve(pool, room.spares));
  }
  SPLICE_ASSIGN_OR_RETURN(ticket->compact, engine::MakeCompactPages(*choice.selector, model, pool, tokens));
  if (ticket->compact != nullptr) SPLICE_RETURN_IF_ERROR(ticket->compact->Reserve(tokens + 1));
  if (pools.landing != nullptr) ReserveLanding(*pools.landing, room.spares, *ticket);
  DescribePages(*ticket, response);
  if (room.compressed) DescribeHoles(*ticket, room.spares, response);
  return ticket;
}

}  // namespace spl::decode
