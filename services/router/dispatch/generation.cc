#include "services/router/dispatch/generation.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "services/base/fault_point.h"
#include "services/base/status.h"
#include "services/router/dispatch/failures.h"
#include "services/router/dispatch/request_grammar.h"

namespace spl::router {
namespace {

FaultPoint tokenize_fault("router.tokenize");
FaultPoint place_fault("router.place");

}  // namespace

Generation::Generation(Dispatcher& core, uint64_t id, GenerationRequest request, std::shared_ptr<GenerationSink> sink,
                       RateLimits::Lease lease)
    : core_(core),
      id_(id),
      request_(std::move(request)),
      sink_(std::move(sink)),
      strand_(boost::asio::make_strand(core.io())),
      deadline_timer_(strand_),
      retry_timer_(strand_),
      arrived_(request_.received == Clock::time_point() ? Clock::now() : request_.received),
      lease_(std::move(lease)),
      answer_(core.metrics()) {}

Generation::~Generation() {
  if (done_) return;
  core_.OnFinished(id_);  // never started, or the router's threads are gone
  core_.OnDelivered(id_);
}

// ---- preparation

void Generation::Start() {
  core_.requests().Begin(id_, {.request_id = request_.request_id,
                               .caller = request_.caller.name,
                               .api = request_.api,
                               .trace_id = request_.trace.TraceIdHex(),
                               .traced = request_.trace.sampled,
                               .reuse = request_.reuse.policy(),
                               .decode = request_.reuse.decode(),
                               .stage = "tokenizing"});
  EndStage(TtftStage::kAccept);
  (void)tokenize_fault.Hit();
  const std::shared_ptr<const FleetSnapshot> fleet = core_.fleet().snapshot();
  absl::StatusOr<RequestPrompt> prompt = PreparePrompt(request_, core_.model(), core_.namespace_keys(), *fleet);
  if (!prompt.ok()) return Post([this, status = prompt.status()] { OnPrepared(status); });
  // A grammar that is wrong costs no worker anything.
  CheckGrammar(core_.grammars(), request_,
               [self = shared_from_this(),
                prompt = std::make_shared<RequestPrompt>(*std::move(prompt))](const absl::Status& status) {
                 self->Post([self = self.get(), prompt, status] {
                   self->OnPrepared(status.ok() ? absl::StatusOr<RequestPrompt>(std::move(*prompt)) : status);
                 });
               });
}

void Generation::OnPrepared(absl::StatusOr<RequestPrompt> prompt) {
  if (done_) return;
  if (!prompt.ok()) return Fail(prompt.status());
  prompt_ = *std::move(prompt);
  const std::shared_ptr<const FleetSnapshot> fleet = core_.fleet().snapshot();
  ResolvePolicy(request_, prompt_, *fleet, core_.quality_records());
  const absl::Status checked = CheckAndClamp(request_, prompt_, *fleet, core_.max_context(),
                                             static_cast<uint32_t>(core_.model().tokenizer().vocab_size()));
  if (!checked.ok()) return Fail(checked);
  answer_.Begin(core_.model().tokenizer(), request_, fleet->model.known ? fleet->model.vocab_size : 0);
  lease_.Take(num_prompt_tokens());
  sink_->OnPrompt(static_cast<uint32_t>(num_prompt_tokens()), prompt_.tokens);
  ArmDeadline();
  EndStage(TtftStage::kTokenize);
  Note("queued");
  EnterQueue();
}

void Generation::ArmDeadline() {
  deadline_timer_.expires_at(request_.deadline);
  deadline_timer_.async_wait([self = shared_from_this()](const boost::system::error_code& error) {
    if (error || self->done_) return;
    self->Fail(Errorf(absl::StatusCode::kDeadlineExceeded, "the request's deadline passed after {:.3f} s",
                      self->SecondsSince(self->arrived_)));
  });
}

QueuedRequest Generation::Queued() {
  const std::weak_ptr<Generation> weak = weak_from_this();
  return {.id = id_,
          .tenant = request_.caller.name,
          .weight = request_.caller.weight,
          .priority = request_.priority,
          .tokens = static_cast<uint32_t>(num_prompt_tokens()),
          .start =
              [weak] {
                if (const auto self = weak.lock()) self->Post([raw = self.get()] { raw->Dispatch(); });
              },
          .refuse =
              [weak](const absl::Status& status) {
                if (const auto self = weak.lock()) self->Cancel(status);
              }};
}

void Generation::EnterQueue() {
  if (const absl::Status entered = core_.admission().Enter(Queued()); !entered.ok()) Fail(entered);
}

// ---- attempts

void Generation::Dispatch() {
  if (done_) return;
  EndStage(waiting_in_);
  if (admitted_ == Clock::time_point()) {
    admitted_ = Clock::now();
    queue_seconds_ = SecondsSince(arrived_);
    core_.metrics().queue_stage_seconds.Observe(queue_seconds_);
  }
  const std::shared_ptr<const FleetSnapshot> fleet = core_.fleet().snapshot();
  const absl::Status placed = Place(*fleet);
  if (placed.ok()) {
    history_.none_since = {};
    return Reserve(*fleet);
  }
  if (placed.code() == absl::StatusCode::kResourceExhausted) {
    history_.full.clear();
    waiting_in_ = TtftStage::kQueue;
    const absl::Status waiting = core_.admission().WaitForRoom(Queued());
    if (!waiting.ok()) Fail(waiting);
    return;
  }
  // A worker that restarts is back within a poll or two: worth the same patience as a failed attempt.
  if (!fleet->model.known) return Fail(placed);
  if (placed.code() == absl::StatusCode::kUnimplemented) return Fail(GrammarStatus(placed, request_));
  WaitForWorkers(placed);
}

absl::Status Generation::Place(const FleetSnapshot& fleet) {
  const Clock::time_point start = Clock::now();
  (void)place_fault.Hit();
  std::vector<PrefixIndex::Holder> holders;
  for (size_t i = 0; i < fleet.num_places(); ++i) {
    const PrefillView& p = fleet.place(i);
    holders.push_back({p.worker_id, p.epoch, p.reads_store, p.total_tokens / chunk::kChunkTokens});
  }
  const std::vector<PredictedReuse> reuse = core_.PredictReuse(prompt_.keys, holders);
  const auto foreign = core_.foreign_load().Of(fleet);
  const auto leaving = core_.planner().leaving();
  const RequestCost cost = core_.costs().Of({request_.reuse, request_.choose_method}, num_prompt_tokens());
  const auto held = core_.decode_sessions().Find(ConversationOf(request_, prompt_, core_.namespace_keys()));
  const uint32_t tokens = static_cast<uint32_t>(num_prompt_tokens() + answer_.tokens().size());
  // Workers whose calls keep failing are avoided as those that have failed this request are.
  std::set<std::string> avoided = core_.breakers().Blocked(start);
  avoided.insert(history_.failed.begin(), history_.failed.end());
  const PlacementQuery query{.fleet = fleet,
                             .loads = core_.loads(),
                             .prompt_tokens = tokens,
                             .total_tokens = tokens + 1,
                             .reuse = reuse,
                             .foreign_tokens = *foreign,
                             .wire_share = cost.wire_share,
                             .held = held.has_value() ? &*held : nullptr,
                             .aligned_cost = cost.aligned_cost,
                             .fetch_bytes_per_s = cost.fetch_bytes_per_s,
                             .structured_output = request_.sampling.structured_output.has_value(),
                             .full = &history_.full,
                             .leaving = leaving.get(),
                             .failed = &avoided};
  const absl::StatusOr<PlacedRequest> placed = PlaceRequest(core_.placement(), query);
  if (placed.ok()) {
    const Candidate& pair = placed->pair;
    attempt_ = std::make_shared<Attempt>();
    attempt_->exact_tokens = placed->exact_tokens;
    if (Publishes(request_.reuse)) core_.NoteSent(prompt_.keys, holders[pair.prefill_idx], placed->exact_tokens);
    core_.breakers().OnSent(pair.prefill->worker_id, start);
    core_.breakers().OnSent(pair.decode->worker_id, start);
    attempt_->prefill = *pair.prefill;
    attempt_->decode = *pair.decode;
    attempt_->link = *pair.link;
    attempt_->expected_seconds = pair.expected_s;
    if (!pair.prefill->local.has_value()) core_.planner().OnPlaced(static_cast<double>(placed->tokens_to_compute));
    attempt_->load = Charge(core_.loads(), query, *placed, request_.sampling.n);
  }
  core_.metrics().decision_seconds.Observe(SecondsSince(start));
  return placed.status();
}

void Generation::Reserve(const FleetSnapshot& fleet) {
  const AttemptPtr attempt = attempt_;
  auto call = std::make_shared<ReserveCall>();
  FillReserveRequest(Sent(), *attempt, fleet, core_.options(), call->request);
  const bool compiles = request_.sampling.structured_output.has_value();
  const auto timeout = core_.options().reserve_timeout + core_.options().grammar_timeout * static_cast<int>(compiles);
  const Clock::time_point deadline = std::min(request_.deadline, Clock::now() + timeout);
  EndStage(TtftStage::kDispatch);
  attempt->reserve_span = CallSpan("router.reserve", attempt->decode.worker_id);
  AddTrace(call->context, attempt->reserve_span.context());
  // Never cancelled: its answer may be a ticket, which has to be given back.
  ReserveCall::Start(call, *attempt->decode.worker, &v1::Decode::Stub::async_interface::Reserve, deadline,
                     [self = shared_from_this(), attempt](const absl::Status& status, ReserveCall& finished) {
                       self->Post([raw = self.get(), attempt, status, ticket = std::move(finished.response)]() mutable {
                         raw->OnReserved(attempt, status, std::move(ticket));
                       });
                     });
}

void Generation::OnReserved(const AttemptPtr& attempt, const absl::Status& status, v1::Ticket ticket) {
  attempt->reserve_span.SetStatus(status);
  attempt->reserve_span.End();
  if (status.ok()) {
    attempt->ticket = std::move(ticket);
    attempt->reserved = true;
  }
  if (done_ || attempt != attempt_) {
    ReleaseTicket(*attempt, "the request ended while its room was being reserved", core_.options());
    return;
  }
  const std::string decode_id = attempt->decode.worker_id;
  if (status.code() == absl::StatusCode::kResourceExhausted) return OnDecodeFull(decode_id);
  if (!status.ok()) {
    if (status.code() == absl::StatusCode::kUnavailable) core_.fleet().ReportFailure(decode_id);
    return OnAttemptFailed(Annotate(status, "reserving on " + decode_id), decode_id);
  }
  core_.admission().Reserved(id_);
  if (!started_output_) stages_.EndCall(TtftStage::kReserve, attempt->ticket.reserve_seconds());
  OpenStream(attempt);
  RunPrefill(attempt);
}

void Generation::OnDecodeFull(const std::string& worker_id) {
  core_.breakers().OnNeither(attempt_->prefill.worker_id);
  core_.breakers().OnNeither(attempt_->decode.worker_id);
  attempt_.reset();
  history_.full.insert(worker_id);
  waiting_in_ = TtftStage::kQueue;  // the answer was that there is no room
  Dispatch();
}

void Generation::OpenStream(const AttemptPtr& attempt) {
  v1::StreamRequest request;
  request.set_ticket_id(attempt->ticket.ticket_id());
  request.set_generation(attempt->ticket.generation());
  const auto self = shared_from_this();
  attempt->decode_span = CallSpan("router.decode", attempt->decode.worker_id);
  attempt->stream = TokenStream::Start(
      *attempt->decode.worker, std::move(request), request_.deadline, attempt->decode_span.context(),
      {.on_chunk =
           [self, attempt](v1::StreamChunk chunk) {
             self->Post([raw = self.get(), attempt, chunk = std::move(chunk)]() mutable {
               raw->OnChunk(attempt, std::move(chunk));
             });
           },
       .on_done =
           [self, attempt](const absl::Status& status) {
             self->Post([raw = self.get(), attempt, status] { raw->OnStreamEnded(attempt, status); });
           }});
}

void Generation::RunPrefill(const AttemptPtr& attempt) {
  ++history_.attempts;
  if (history_.attempts > 1) core_.metrics().prefill_retries.Increment();
  auto call = std::make_shared<PrefillCall>();
  FillPrefillRequest(Sent(), *attempt, call->request);
  attempt->writer_quiet = false;
  attempt->prefill_call = call;
  core_.metrics().CountPrefill(attempt->prefill.local.has_value());
  attempt->prefill_span = CallSpan("router.prefill", attempt->prefill.worker_id);
  AddTrace(call->context, attempt->prefill_span.context());
  EndStage(TtftStage::kDispatch);
  Note("prefill");
  PrefillCall::Start(call, *attempt->prefill.worker, &v1::Prefill::Stub::async_interface::Run, request_.deadline,
                     [self = shared_from_this(), attempt](const absl::Status& status, PrefillCall& finished) {
                       self->Post([raw = self.get(), attempt, status, response = std::move(finished.response)] {
                         raw->OnPrefilled(attempt, status, response);
                       });
                     });
}

void Generation::OnPrefilled(const AttemptPtr& attempt, const absl::Status& status,
                             const v1::PrefillResponse& response) {
  attempt->prefill_call.reset();
  attempt->prefill_span.SetStatus(status);
  attempt->prefill_span.End();
  attempt->load.prefill.Reset();
  if (done_ || attempt != attempt_) return;
  if (GivenUpByWorker(status.code())) attempt->writer_quiet = true;
  if (!status.ok()) {
    if (status.code() == absl::StatusCode::kUnavailable) core_.fleet().Look(attempt->prefill.process_id());
    return OnAttemptFailed(Annotate(status, "prefill on " + attempt->prefill.worker_id), attempt->prefill.worker_id);
  }
  if (response.first_tokens_size() != static_cast<int>(answer_.num_continuations())) {
    return OnAttemptFailed(
        Errorf(absl::StatusCode::kInternal, "prefill on {} gave {} first tokens for {} continuations",
               attempt->prefill.worker_id, response.first_tokens_size(), answer_.num_continuations()),
        attempt->prefill.worker_id);
  }
  attempt->prefilled = true;
  if (!started_output_) {
    const v1::Receipt& receipt = response.receipt();
    stages_.EndPrefillCall({.run_s = response.run_seconds(),
                            .queue_s = receipt.queue_seconds(),
                            .lookup_s = receipt.lookup_seconds(),
                            .fetch_s = receipt.fetch_seconds(),
                            .prefill_s = receipt.prefill_seconds()});
  }
  core_.breakers().OnSuccess(attempt->prefill.worker_id);
  Learn(*attempt, response.receipt());
  DeliverFirst(response);
  std::vector<v1::StreamChunk> early = std::move(attempt->early);
  for (const v1::StreamChunk& chunk : early) {
    if (!done_) Deliver(chunk);
  }
  if (done_) return;
  if (attempt->stream_ended) return OnStreamEnded(attempt, attempt->early_end);
  if (!paused_ && !early.empty()) attempt->stream->ReadNext();
}

// Records what really happened, for the placement of other requests.
void Generation::Learn(const Attempt& attempt, const v1::Receipt& receipt) {
  if (receipt.has_choice()) {
    core_.quality_records().Observe(prompt_.namespace_key, {.caller = request_.caller.name,
                                                            .name_space = request_.namespace_name,
                                                            .worker = attempt.prefill.worker_id,
                                                            .choice = receipt.choice(),
                                                            .seen = Clock::now()});
  }
  core_.costs().Observe({request_.reuse, request_.choose_method}, receipt,
                        // Computing beside decode steps says nothing of what a token costs.
                        {.tokens_per_s = attempt.prefill.local.has_value() ? 0 : attempt.prefill.tokens_per_s,
                         .kv_bytes_per_token = attempt.decode.kv_bytes_per_token});
  if (const std::string turn = ConversationOf(request_, prompt_, core_.namespace_keys()); !turn.empty())
    core_.decode_sessions().Note(turn, {attempt.decode.worker_id, attempt.decode.epoch,
                                        static_cast<uint32_t>(prompt_.keys.prefix.size() * chunk::kChunkTokens)});
  if (!core_.options().has_store || !Publishes(request_.reuse) || !attempt.prefill.reads_store) return;
  const uint32_t exact = receipt.aligned_tokens() == 0 ? std::numeric_limits<uint32_t>::max() : attempt.exact_tokens;
  core_.prefix_index().InsertStored(prompt_.keys, exact, Clock::now());
}

void Generation::OnChunk(const AttemptPtr& attempt, v1::StreamChunk chunk) {
  attempt->writer_quiet = true;  // it was committed, and checked
  if (done_ || attempt != attempt_) {
    if (attempt->stream != nullptr) attempt->stream->Cancel();
    return;
  }
  if (!attempt->prefilled) {
    attempt->early.push_back(std::move(chunk));
    return;
  }
  core_.breakers().OnSuccess(attempt->decode.worker_id);
  Deliver(chunk);
  if (!paused_ && attempt->stream != nullptr) attempt->stream->ReadNext();
}

void Generation::OnStreamEnded(const AttemptPtr& attempt, const absl::Status& status) {
  attempt->stream.reset();
  attempt->decode_span.SetStatus(status);
  attempt->decode_span.End();
  attempt->stream_ended = true;
  attempt->early_end = status;
  if (done_ || attempt != attempt_) return;
  // Prefill's answer says more: the first tokens were the last ones, or it gave the ticket up and says why. The failure
  // is not the decode worker's.
  if (!attempt->prefilled && (status.ok() || status.code() == absl::StatusCode::kCancelled)) return;
  const std::string& worker_id = attempt->decode.worker_id;
  if (status.code() == absl::StatusCode::kUnavailable) core_.fleet().ReportFailure(worker_id);
  const absl::Status cause =
      status.ok() ? Errorf(absl::StatusCode::kUnavailable, "the stream ended before the last token") : status;
  OnAttemptFailed(Annotate(cause, "decoding on " + worker_id), worker_id);
}

}  // namespace spl::router
