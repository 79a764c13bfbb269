#include "services/router/dispatch/generation.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <limits>
#include <utility>

#include "services/base/fault_point.h"
#include "services/base/log.h"
#include "services/router/request/api_error.h"
#include "services/router/request/wire.h"

namespace spl::router {
namespace {

FaultPoint tokenize_fault("router.tokenize");
FaultPoint place_fault("router.place");
FaultPoint deliver_fault("router.deliver");

// The request itself is at fault: another worker would say the same.
bool IsRequestsFault(absl::StatusCode code) {
  return code == absl::StatusCode::kInvalidArgument || code == absl::StatusCode::kUnimplemented ||
         code == absl::StatusCode::kOutOfRange || code == absl::StatusCode::kPermissionDenied;
}

// The prefill worker gave up and said so itself, so its writes have ended; other codes may come from a broken
// connection.
bool GivenUpByWorker(absl::StatusCode code) {
  return IsRequestsFault(code) || code == absl::StatusCode::kResourceExhausted ||
         code == absl::StatusCode::kFailedPrecondition || code == absl::StatusCode::kAborted ||
         code == absl::StatusCode::kDataLoss;
}

// A failure that tells something about the worker. A full one, one that has not this model, and a request that ran out
// of time do not.
bool IsWorkersFault(absl::StatusCode code) {
  return code == absl::StatusCode::kUnavailable || code == absl::StatusCode::kInternal ||
         code == absl::StatusCode::kUnknown || code == absl::StatusCode::kDataLoss;
}

// What the client sees of a failure inside the cluster: it may try again. A deadline inside the cluster, of a ticket
// for example, is not the client's.
absl::Status ToClientStatus(const absl::Status& status, uint32_t attempts) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kResourceExhausted:
      return status;
    default:
      return Errorf(absl::StatusCode::kUnavailable, "the request failed after {} attempts: {}", attempts,
                    MessageOf(status));
  }
}

const char* PromptField(const Prompt& prompt) {
  return std::holds_alternative<ChatPrompt>(prompt) ? "messages" : "prompt";
}

}  // namespace

template <typename Function>
void Generation::Post(Function function) {
  boost::asio::post(strand_, [self = shared_from_this(), function = std::move(function)]() mutable { function(); });
}

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
      lease_(std::move(lease)) {}

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
                               .reuse = request_.reuse.policy(),
                               .decode = request_.reuse.decode(),
                               .stage = "tokenizing"});
  EndStage(TtftStage::kAccept);
  (void)tokenize_fault.Hit();
  absl::StatusOr<TokenizedPrompt> tokens = [&]() -> absl::StatusOr<TokenizedPrompt> {
    SPLICE_RETURN_IF_ERROR(ValidateRequest(request_));
    SPLICE_RETURN_IF_ERROR(core_.model().CheckName(request_.model));
    return core_.model().Tokenize(request_.prompt, request_.add_special_tokens);
  }();
  namespace_key_ = core_.namespace_keys().Derive(request_.caller, request_.namespace_name);
  // Unmarked text would become a source with whatever its caller has in front of it.
  if (NamespaceKeys::IsPublic(request_.namespace_name)) request_.reuse.set_auto_segments(false);
  if (tokens.ok()) MakeKeys(*tokens);
  Post([this, tokens = std::move(tokens)]() mutable { OnPrepared(std::move(tokens)); });
}

Generation::SegmentNamespace Generation::NamespaceOf(const TokenSegment& segment) const {
  SegmentNamespace space;
  if (segment.namespace_key.size() == space.key.size()) {
    std::copy(segment.namespace_key.begin(), segment.namespace_key.end(), space.key.begin());
    return space;
  }
  const std::string& name = segment.namespace_name.empty() ? request_.namespace_name : segment.namespace_name;
  return {core_.namespace_keys().Derive(request_.caller, name), NamespaceKeys::IsPublic(name)};
}

void Generation::MakeKeys(const TokenizedPrompt& prompt) {
  const std::shared_ptr<const FleetSnapshot> fleet = core_.fleet().snapshot();
  if (!fleet->model.known) return;
  keys_.prefix = chunk::MakePrefixKeys(fleet->model.fingerprint, namespace_key_, prompt.ids);
  for (const TokenSegment& s : prompt.segments) {
    const auto tokens = std::span(prompt.ids).subspan(s.begin, s.end - s.begin);
    std::vector<chunk::ChunkKey> chunks = MakeSegmentKeys(fleet->model.fingerprint, NamespaceOf(s).key, tokens);
    if (chunks.empty()) continue;
    keys_.segments.push_back({.key = chunks.back(), .begin = s.begin, .end = s.end, .chunks = std::move(chunks)});
  }
}

void Generation::OnPrepared(absl::StatusOr<TokenizedPrompt> tokens) {
  if (done_) return;
  if (!tokens.ok()) return Fail(tokens.status());
  prompt_ = std::move(tokens->ids);
  segments_ = std::move(tokens->segments);
  const std::shared_ptr<const FleetSnapshot> fleet = core_.fleet().snapshot();
  // What "auto" is must be known before pages are reserved: a method with head classes needs fewer.
  const std::string_view asked = methods::PolicyOf(request_.reuse.policy(), request_.reuse.quality());
  const bool reuses = !segments_.empty() || request_.reuse.auto_segments();
  request_.reuse.set_policy(std::string(methods::ResolvePolicy(asked, reuses, fleet->model.default_reuse)));
  if (!methods::ReusesSegments(request_.reuse.policy())) keys_.segments.clear();
  const absl::Status checked = CheckAndClamp(*fleet);
  if (!checked.ok()) return Fail(checked);
  for (uint32_t i = 0; i < request_.sampling.n; ++i) {
    continuations_.push_back(std::make_unique<Continuation>(core_.model().tokenizer(), request_,
                                                            fleet->model.known ? fleet->model.vocab_size : 0));
  }
  lease_.Take(prompt_.size());
  ArmDeadline();
  EndStage(TtftStage::kTokenize);
  Note("queued");
  EnterQueue();
}

absl::Status Generation::CheckAndClamp(const FleetSnapshot& fleet) {
  const std::string field = PromptField(request_.prompt);
  if (prompt_.empty()) return ParamError(field, "has no tokens");
  const uint64_t context = core_.max_context();
  const auto too_long = [&](const char* what, uint64_t room) {
    return SetErrorCode(ParamError(field, "the prompt has {} tokens, but {} {} tokens, the output included",
                                   prompt_.size(), what, room),
                        "context_length_exceeded");
  };
  if (prompt_.size() + 1 > context) return too_long("the model's context is", context);
  uint64_t prefill_room = 0;
  for (const PrefillView& p : fleet.prefill) {
    prefill_room = std::max(prefill_room, p.max_prompt_tokens == 0 ? context : p.max_prompt_tokens);
  }
  if (!fleet.prefill.empty() && prompt_.size() > prefill_room) return too_long("a prefill worker holds", prefill_room);
  uint64_t decode_room = fleet.decode.empty() ? context : 0;
  for (const DecodeView& d : fleet.decode) {
    decode_room = std::max(decode_room, d.max_sequence_tokens == 0 ? context : d.max_sequence_tokens);
  }
  if (prompt_.size() + 1 > decode_room) return too_long("a decode worker holds", decode_room);
  const uint32_t room = static_cast<uint32_t>(std::min(context, decode_room) - prompt_.size());
  request_.sampling.max_tokens = std::min(request_.sampling.max_tokens.value_or(room), room);
  request_.sampling.min_tokens = std::min(request_.sampling.min_tokens, *request_.sampling.max_tokens);
  return CheckTokenIds(fleet.model.known ? fleet.model.vocab_size
                                         : static_cast<uint32_t>(core_.model().tokenizer().vocab_size()));
}

absl::Status Generation::CheckTokenIds(uint32_t vocab_size) const {
  for (const uint32_t id : request_.sampling.stop_token_ids) {
    if (id >= vocab_size) return ParamError("stop_token_ids", "{} is not one of the {} token ids", id, vocab_size);
  }
  for (const auto& [id, bias] : request_.sampling.logit_bias) {
    if (id >= vocab_size) return ParamError("logit_bias", "{} is not one of the {} token ids", id, vocab_size);
  }
  return absl::OkStatus();
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
          .tokens = static_cast<uint32_t>(prompt_.size()),
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
  const absl::Status entered = core_.admission().Enter(Queued());
  if (!entered.ok()) Fail(entered);
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
  const absl::StatusOr<Candidate> candidate = Place(*fleet);
  if (candidate.ok()) {
    none_since_ = {};
    return Reserve(*fleet);
  }
  if (candidate.status().code() == absl::StatusCode::kResourceExhausted) {
    full_.clear();
    waiting_in_ = TtftStage::kQueue;
    const absl::Status waiting = core_.admission().WaitForRoom(Queued());
    if (!waiting.ok()) Fail(waiting);
    return;
  }
  // A worker that restarts is back within a poll or two: worth the same patience as a failed attempt.
  if (!fleet->model.known) return Fail(candidate.status());
  WaitForWorkers(candidate.status());
}

// Nothing was started, so this is no attempt. `missing` says what there is none of.
void Generation::WaitForWorkers(const absl::Status& missing) {
  waiting_in_ = TtftStage::kRetry;
  if (none_since_ == Clock::time_point()) none_since_ = Clock::now();
  if (Clock::now() - none_since_ >= core_.options().worker_wait)
    return Fail(attempts_ == 0 ? missing : ToClientStatus(missing, attempts_));
  retry_timer_.expires_after(core_.options().retry_backoff);
  retry_timer_.async_wait([self = shared_from_this()](const boost::system::error_code& error) {
    if (!error) self->Dispatch();
  });
}

absl::StatusOr<Candidate> Generation::Place(const FleetSnapshot& fleet) {
  const Clock::time_point start = Clock::now();
  (void)place_fault.Hit();
  std::vector<PrefixIndex::Holder> holders;
  for (size_t i = 0; i < fleet.num_places(); ++i) {
    const PrefillView& p = fleet.place(i);
    holders.push_back({p.worker_id, p.epoch, p.reads_store});
  }
  const std::vector<PredictedReuse> reuse = core_.PredictReuse(keys_, holders);
  const auto foreign = core_.foreign_load().Of(fleet);
  const auto leaving = core_.planner().leaving();
  const RequestCost cost = core_.costs().Of(request_.reuse);
  const uint32_t tokens = static_cast<uint32_t>(prompt_.size() + output_.size());
  // Workers whose calls keep failing are avoided as those that have failed this request are.
  std::set<std::string> avoided = core_.breakers().Blocked(start);
  avoided.insert(failed_.begin(), failed_.end());
  const PlacementQuery query{.fleet = fleet,
                             .loads = core_.loads(),
                             .prompt_tokens = tokens,
                             .total_tokens = tokens + 1,
                             .reuse = reuse,
                             .foreign_tokens = foreign != nullptr ? *foreign : std::span<const uint64_t>(),
                             .wire_share = cost.wire_share,
                             .aligned_cost = cost.aligned_cost,
                             .fetch_bytes_per_s = cost.fetch_bytes_per_s,
                             // What is left out of heads is kept for the decode worker by a prefill worker.
                             .may_stay_local = !request_.reuse.decode_restore(),
                             .full = &full_,
                             .leaving = leaving.get(),
                             .failed = &avoided};
  absl::StatusOr<Candidate> candidate = core_.placement().Place(query);
  if (candidate.ok()) {
    attempt_ = std::make_shared<Attempt>();
    attempt_->exact_tokens = reuse[candidate->prefill_idx].exact_tokens;
    if (Publishes(request_.reuse)) core_.NoteSent(keys_, holders[candidate->prefill_idx], attempt_->exact_tokens);
    core_.breakers().OnSent(candidate->prefill->worker_id, start);
    core_.breakers().OnSent(candidate->decode->worker_id, start);
    attempt_->prefill = *candidate->prefill;
    attempt_->decode = *candidate->decode;
    attempt_->link = *candidate->link;
    attempt_->expected_seconds = candidate->expected_s;
    const auto computed = static_cast<uint64_t>(ComputeScorer::TokensToCompute(query, candidate->prefill_idx));
    if (!candidate->prefill->local.has_value()) core_.planner().OnPlaced(static_cast<double>(computed));
    attempt_->prefill_load = core_.loads().Add(candidate->prefill->worker_id, {.prefill_tokens = computed});
    attempt_->decode_load =
        core_.loads().Add(candidate->decode->worker_id, {.prefill_tokens = tokens, .sequences = request_.sampling.n});
  }
  core_.metrics().decision_seconds.Observe(SecondsSince(start));
  return candidate;
}

size_t Generation::NumPriorOutput() const { return attempt_->decode.replays ? 0 : output_.size(); }

void Generation::AddTokensToPrefill(google::protobuf::RepeatedField<uint32_t>& tokens) const {
  tokens.Add(prompt_.begin(), prompt_.end());
  tokens.Add(output_.begin(), output_.begin() + static_cast<std::ptrdiff_t>(NumPriorOutput()));
}

void Generation::Reserve(const FleetSnapshot& fleet) {
  const AttemptPtr attempt = attempt_;
  auto call = std::make_shared<ReserveCall>();
  v1::ReserveRequest& request = call->request;
  request.set_request_id(request_.request_id);
  request.set_prompt_tokens(static_cast<uint32_t>(prompt_.size() + NumPriorOutput()));
  *request.mutable_sampling() = ToProto(request_.sampling);
  *request.mutable_reuse() = request_.reuse;
  request.set_model_fingerprint(fleet.model.fingerprint.data(), fleet.model.fingerprint.size());
  constexpr double kTtlMsMax = 86'400e3;  // of nobody's interest beyond what the worker allows
  request.set_ttl_ms(static_cast<uint32_t>(
      std::min(kTtlMsMax, static_cast<double>(core_.options().ticket_ttl.count()) +
                              1e3 * core_.options().ticket_ttl_per_expected * attempt->expected_seconds)));
  request.set_num_output_tokens(static_cast<uint32_t>(NumPriorOutput()));
  if (attempt->decode.replays) request.mutable_replay_token_ids()->Add(output_.begin(), output_.end());
  if (request_.sampling.HasPenalty() || DecodeReadsPrompt(request_.reuse) || NumPriorOutput() > 0)
    AddTokensToPrefill(*request.mutable_token_ids());
  request.set_kv_bytes_per_s(attempt->link.bytes_per_s);
  request.set_kv_write_seconds(attempt->link.write_s);
  *request.mutable_writer() = attempt->link.writer;
  const Clock::time_point deadline = std::min(request_.deadline, Clock::now() + core_.options().reserve_timeout);
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
    Release(*attempt, "the request ended while its room was being reserved");
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
  full_.insert(worker_id);
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
  ++attempts_;
  if (attempts_ > 1) core_.metrics().prefill_retries.Increment();
  auto call = std::make_shared<PrefillCall>();
  v1::PrefillRequest& request = call->request;
  request.set_request_id(request_.request_id);
  AddTokensToPrefill(*request.mutable_token_ids());
  *request.mutable_sampling() = ToProto(request_.sampling);
  *request.mutable_reuse() = request_.reuse;
  request.set_namespace_key(namespace_key_.data(), namespace_key_.size());
  for (const TokenSegment& segment : segments_) {
    v1::TokenSegment& out = *request.add_segments();
    out.set_begin(segment.begin);
    out.set_end(segment.end);
    out.set_frozen(segment.frozen);
    const SegmentNamespace space = NamespaceOf(segment);
    out.set_namespace_key(space.key.data(), space.key.size());
    out.set_shared(space.shared);
  }
  if (!request_.session.empty()) {
    request.set_session(request_.session);
    const chunk::Digest owner = core_.namespace_keys().DeriveOwner(request_.caller);
    request.set_session_owner(owner.data(), owner.size());
  }
  *request.mutable_ticket() = attempt->ticket;
  request.set_num_output_tokens(static_cast<uint32_t>(NumPriorOutput()));
  attempt->writer_quiet = false;
  attempt->prefill_call = call;
  core_.metrics().CountPrefill(attempt->prefill.local.has_value());
  attempt->prefill_span = CallSpan("router.prefill", attempt->prefill.worker_id);
  AddTrace(call->context, attempt->prefill_span.context());
  EndStage(TtftStage::kDispatch);
  Note("prefill");
  PrefillCall::Start(
      call, *attempt->prefill.worker, &v1::Prefill::Stub::async_interface::Run, request_.deadline,
      [self = shared_from_this(), attempt](const absl::Status& status, PrefillCall& finished) {
        self->Post([raw = self.get(), attempt, status, response = std::move(finished.response)]() mutable {
          raw->OnPrefilled(attempt, status, std::move(response));
        });
      });
}

void Generation::OnPrefilled(const AttemptPtr& attempt, const absl::Status& status, v1::PrefillResponse response) {
  attempt->prefill_call.reset();
  attempt->prefill_span.SetStatus(status);
  attempt->prefill_span.End();
  attempt->prefill_load.Reset();
  if (done_ || attempt != attempt_) return;
  if (GivenUpByWorker(status.code())) attempt->writer_quiet = true;
  if (!status.ok()) {
    if (status.code() == absl::StatusCode::kUnavailable) core_.fleet().Look(attempt->prefill.process_id());
    return OnAttemptFailed(Annotate(status, "prefill on " + attempt->prefill.worker_id), attempt->prefill.worker_id);
  }
  if (response.first_tokens_size() != static_cast<int>(continuations_.size())) {
    return OnAttemptFailed(
        Errorf(absl::StatusCode::kInternal, "prefill on {} gave {} first tokens for {} continuations",
               attempt->prefill.worker_id, response.first_tokens_size(), continuations_.size()),
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
  Learn(*attempt, FromProto(response.receipt()));
  DeliverFirst(response);
  std::vector<v1::StreamChunk> early = std::move(attempt->early);
  for (const v1::StreamChunk& chunk : early) {
    if (!done_) Deliver(chunk);
  }
  if (done_) return;
  if (attempt->stream_ended) return OnStreamEnded(attempt, attempt->early_end);
  if (!paused_ && !early.empty()) attempt->stream->ReadNext();
}

// Of what really happened, for the placement of others.
void Generation::Learn(const Attempt& attempt, const RequestReceipt& receipt) {
  core_.costs().Observe(request_.reuse, receipt,
                        // Computing beside decode steps says nothing of what a token costs.
                        {.tokens_per_s = attempt.prefill.local.has_value() ? 0 : attempt.prefill.tokens_per_s,
                         .kv_bytes_per_token = attempt.decode.kv_bytes_per_token});
  if (!core_.options().has_store || !Publishes(request_.reuse) || !attempt.prefill.reads_store) return;
  const uint32_t exact = receipt.aligned_tokens == 0 ? std::numeric_limits<uint32_t>::max() : attempt.exact_tokens;
  core_.prefix_index().InsertStored(keys_, exact, Clock::now());
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
  if (!attempt->prefilled && status.ok()) return;  // the first tokens were the last ones: prefill's answer says so
  const std::string& worker_id = attempt->decode.worker_id;
  if (status.code() == absl::StatusCode::kUnavailable) core_.fleet().ReportFailure(worker_id);
  const absl::Status cause =
      status.ok() ? Errorf(absl::StatusCode::kUnavailable, "the stream ended before the last token") : status;
  OnAttemptFailed(Annotate(cause, "decoding on " + worker_id), worker_id);
}

void Generation::OnWorkerLost(const std::string& worker_id) {
  Post([this, worker_id] {
    if (done_ || attempt_ == nullptr || !attempt_->reserved) return;
    const bool on_prefill = attempt_->prefill_call != nullptr && attempt_->prefill.process_id() == worker_id;
    if (!on_prefill && attempt_->decode.worker_id != worker_id) return;
    OnAttemptFailed(Errorf(absl::StatusCode::kUnavailable, "worker {} is lost", worker_id), worker_id);
  });
}

// Decides whether the request goes on elsewhere.
void Generation::OnAttemptFailed(const absl::Status& status, const std::string& worker_id) {
  const bool lost_stream = attempt_ != nullptr && attempt_->prefilled;
  waiting_in_ = TtftStage::kRetry;
  if (IsWorkersFault(status.code())) core_.breakers().OnFailure(worker_id, Clock::now());
  NoteKill(status, worker_id);
  Abandon("the attempt failed");
  failed_.insert(worker_id);
  if (IsRequestsFault(status.code())) return Fail(status);
  if (Clock::now() >= request_.deadline) {
    return Fail(Errorf(absl::StatusCode::kDeadlineExceeded, "the request's deadline passed"));
  }
  if (started_output_ && continuations_.size() > 1) {
    return Fail(Annotate(ToClientStatus(status, attempts_), "a request with n > 1 cannot move to another worker"));
  }
  if (lost_stream ? migrations_ >= core_.options().max_migrations : failures_ + 1 >= core_.options().max_attempts) {
    return Fail(ToClientStatus(status, std::max(attempts_, 1U)));
  }
  if (!core_.retry_budget().TakeRetry(Clock::now())) {
    core_.metrics().budget_refusals.Increment();
    return Fail(Annotate(ToClientStatus(status, std::max(attempts_, 1U)),
                         "too many requests are being retried; this one is not"));
  }
  if (lost_stream) {
    ++migrations_;
    core_.metrics().migrations.Increment();
  } else {
    ++failures_;
  }
  log::Warning(lost_stream ? "router.migration" : "router.retry", log::F("request", request_.request_id),
               log::F("status", status), log::F("output_tokens", output_.size()));
  RetryLater();
}

// The worker broke off in the middle of this request: perhaps because of it.
void Generation::NoteKill(const absl::Status& status, const std::string& worker_id) {
  if (status.code() != absl::StatusCode::kUnavailable || attempt_ == nullptr || !attempt_->reserved) return;
  const bool is_prefill = attempt_->prefill.worker_id == worker_id;
  if (!is_prefill && attempt_->decode.worker_id != worker_id) return;
  suspects_.push_back({is_prefill ? attempt_->prefill.process_id() : worker_id,
                       is_prefill ? attempt_->prefill.epoch : attempt_->decode.epoch, Clock::now()});
}

// At once when there is a pair that has not failed this request; else after a pause, so that a worker can come back, or
// be connected.
void Generation::RetryLater() {
  uint32_t killed = 0, unknown = 0;
  for (const Suspect& suspect : suspects_) {
    const Fleet::Fate fate = core_.fleet().FateOf(suspect.worker_id, suspect.epoch, suspect.since);
    killed += fate == Fleet::Fate::kLost;
    unknown += fate == Fleet::Fate::kUnknown;
  }
  const uint32_t most = core_.options().max_kills;
  if (killed >= most) {
    core_.metrics().poisoned.Increment();
    return Fail(SetErrorCode(
        Errorf(absl::StatusCode::kInvalidArgument,
               "{} workers were lost while they worked on this request; it is not tried on another one", killed),
        "request_killed_workers"));
  }
  // It goes nowhere before it is known what it has done.
  if (killed + unknown >= most && Clock::now() < suspects_.back().since + core_.options().fate_timeout) {
    retry_timer_.expires_after(std::chrono::milliseconds(20));
    retry_timer_.async_wait([self = shared_from_this()](const boost::system::error_code& error) {
      if (!error && !self->done_) self->RetryLater();
    });
    return;
  }
  const std::shared_ptr<const FleetSnapshot> fleet = core_.fleet().snapshot();
  const auto fresh = [&](const auto& workers) {
    return std::any_of(workers.begin(), workers.end(), [&](const auto& w) { return !failed_.contains(w.worker_id); });
  };
  const auto short_enough = [&](const PrefillView& p) {
    return !failed_.contains(p.worker_id) && prompt_.size() + output_.size() <= p.local->max_new_tokens;
  };
  const bool local = std::any_of(fleet->local.begin(), fleet->local.end(), short_enough);
  if ((fresh(fleet->prefill) || local) && fresh(fleet->decode)) return Dispatch();
  retry_timer_.expires_after(core_.options().retry_backoff * std::max(failures_, 1U));
  retry_timer_.async_wait([self = shared_from_this()](const boost::system::error_code& error) {
    if (!error) self->Dispatch();
  });
}

// Ends the current attempt on both workers; what still arrives from it is ignored.
void Generation::Abandon(const char* reason) {
  const AttemptPtr attempt = std::move(attempt_);
  attempt_ = nullptr;
  if (attempt == nullptr) return;
  if (attempt->prefill_call != nullptr) attempt->prefill_call->Cancel();
  if (attempt->stream != nullptr) attempt->stream->Cancel();
  core_.breakers().OnNeither(attempt->prefill.worker_id);
  core_.breakers().OnNeither(attempt->decode.worker_id);
  Release(*attempt, reason);
}

namespace {

// If it fails the worker is gone, or the ticket expires there.
void SendRelease(DecodeWorker& worker, const v1::Ticket& ticket, const char* reason, bool writer_quiet,
                 std::chrono::milliseconds timeout) {
  using Call = UnaryCall<v1::ReleaseRequest, v1::ReleaseResponse>;
  auto call = std::make_shared<Call>();
  call->request.set_ticket_id(ticket.ticket_id());
  call->request.set_generation(ticket.generation());
  call->request.set_reason(reason);
  call->request.set_writer_quiet(writer_quiet);
  Call::Start(call, worker, &v1::Decode::Stub::async_interface::Release, std::chrono::steady_clock::now() + timeout,
              [](const absl::Status&, Call&) {});
}

}  // namespace

void Generation::Release(Attempt& attempt, const char* reason) {
  if (!attempt.reserved) return;
  attempt.reserved = false;
  SendRelease(*attempt.decode.worker, attempt.ticket, reason, attempt.writer_quiet, core_.options().release_timeout);
  if (!attempt.writer_quiet) AskWriter(attempt, reason);
}

// Until the prefill worker has said that it does not write, now or later, the pages are of no use to anybody: the call
// may have been cancelled before it arrived there, or behind its end. Without an answer they wait for the ticket's end.
void Generation::AskWriter(const Attempt& attempt, const char* reason) {
  using Call = UnaryCall<v1::RevokeTicketRequest, v1::RevokeTicketResponse>;
  auto call = std::make_shared<Call>();
  call->request.set_ticket_id(attempt.ticket.ticket_id());
  call->request.set_epoch(attempt.prefill.epoch);
  call->request.set_ttl_ms(attempt.ticket.ttl_ms());
  Call::Start(call, *attempt.prefill.worker, &v1::Prefill::Stub::async_interface::RevokeTicket,
              Clock::now() + core_.options().revoke_timeout,
              [decode = attempt.decode.worker, ticket = attempt.ticket, reason,
               timeout = core_.options().release_timeout](const absl::Status& status, Call&) {
                if (status.ok()) SendRelease(*decode, ticket, reason, true, timeout);
              });
}

// ---- output

void Generation::DeliverFirst(const v1::PrefillResponse& response) {
  if (!started_output_) {
    receipt_ = FromProto(response.receipt());
    receipt_.prefill_worker = attempt_->prefill.process_id();
    receipt_.prefill = attempt_->prefill.local.has_value() ? "local" : "pool";
  }
  receipt_.decode_worker = attempt_->decode.worker_id;
  if (receipt_.transport.empty()) receipt_.transport = attempt_->link.transport;
  if (attempt_->decode.replays && !output_.empty()) return;  // it is the client's already
  std::vector<Delta> deltas;
  for (int i = 0; i < response.first_tokens_size(); ++i) {
    const absl::Status taken = Take(static_cast<uint32_t>(i), response.first_tokens(i), &deltas);
    if (!taken.ok()) return Fail(taken);
  }
  Emit(std::move(deltas));
}

void Generation::Deliver(const v1::StreamChunk& chunk) {
  if (chunk.has_restores()) {
    const v1::StreamChunk::Restores& restores = chunk.restores();
    receipt_.decode_restored_heads = restores.restored_heads();
    receipt_.restore_misses = restores.missed_lease() + restores.missed_pages() + restores.missed_fetch();
  }
  if (chunk.has_kv_bytes()) receipt_.decode_kv_bytes = chunk.kv_bytes();
  std::vector<Delta> deltas;
  for (const v1::StreamChunk::Token& token : chunk.tokens()) {
    const absl::Status taken = Take(token.index(), token.token(), &deltas);
    if (!taken.ok()) return Fail(taken);
  }
  Emit(std::move(deltas));
}

absl::Status Generation::Take(uint32_t index, const v1::SampledToken& sampled, std::vector<Delta>* deltas) {
  if (index >= continuations_.size()) {
    return Errorf(absl::StatusCode::kInternal, "a worker sent a token of continuation {} of {}", index,
                  continuations_.size());
  }
  Continuation& continuation = *continuations_[index];
  if (continuation.finished()) return absl::OkStatus();
  const FinishReason reason = FromProto(sampled.finish_reason());
  if (reason == FinishReason::kError || reason == FinishReason::kCancelled) {
    return Errorf(absl::StatusCode::kInternal, "the decode worker ended the request: {}", FinishReasonName(reason));
  }
  ++completion_tokens_;
  core_.metrics().generation_tokens.Increment();
  if (continuations_.size() == 1) output_.push_back(static_cast<TokenId>(sampled.token_id()));
  auto delta = std::find_if(deltas->begin(), deltas->end(), [&](const Delta& d) { return d.index == index; });
  if (delta == deltas->end()) {
    deltas->push_back({.index = index});
    delta = std::prev(deltas->end());
  }
  SPLICE_RETURN_IF_ERROR(continuation.Append(TokenFromProto(sampled), reason, &*delta));
  if (delta->finish_reason == FinishReason::kStop) core_.metrics().finished_stop.Increment();
  if (delta->finish_reason == FinishReason::kLength) core_.metrics().finished_length.Increment();
  return absl::OkStatus();
}

void Generation::Emit(std::vector<Delta> deltas) {
  ObserveLatency();
  if (!started_output_) ObserveFirst();
  started_output_ = true;
  Note("decoding");
  if (AllFinished()) {
    const FinalInfo final = MakeFinal();
    const std::shared_ptr<GenerationSink> sink = sink_;
    Succeed();
    sink->OnOutput(deltas, &final);
    core_.OnDelivered(id_);
    return;
  }
  std::erase_if(deltas, [](const Delta& d) {
    return d.text.empty() && d.tokens.empty() && d.finish_reason == FinishReason::kNone;
  });
  if (!deltas.empty() && !sink_->OnOutput(deltas, nullptr)) paused_ = true;
}

// Until the first token; behind it a retry is a span and no stage.
void Generation::EndStage(TtftStage stage) {
  const TtftStages::Clock::time_point start = stages_.cursor();
  if (started_output_) return;
  stages_.End(stage);
  if (!core_.tracer().Records(request_.trace)) return;
  const std::string name = std::string("router.") + TtftStageName(stage);
  core_.tracer().Record(request_.trace, {.name = name, .start = start, .end = stages_.cursor()});
}

Span Generation::CallSpan(std::string_view name, const std::string& worker_id) const {
  Span span(core_.tracer(), name, request_.trace, SpanKind::kClient);
  span.Set("splice.worker", worker_id);
  return span;
}

void Generation::RecordTrace(const absl::Status& status) const {
  if (!core_.tracer().Records(request_.trace)) return;
  core_.tracer().Record(request_.trace, request_.parent_trace,
                        {.name = "router.request",
                         .kind = SpanKind::kServer,
                         .start = arrived_,
                         .end = Clock::now(),
                         .attributes = {{"splice.request", request_.request_id},
                                        {"splice.api", request_.api},
                                        {"splice.caller", request_.caller.name},
                                        {"splice.prompt_tokens", static_cast<int64_t>(prompt_.size())},
                                        {"splice.cached_tokens", static_cast<int64_t>(receipt_.cached_tokens)},
                                        {"splice.output_tokens", static_cast<int64_t>(completion_tokens_)},
                                        {"splice.attempts", static_cast<int64_t>(attempts_)},
                                        {"splice.ttft_seconds", ttft_seconds_}},
                         .status = status});
}

// The first token's text is ready for the client's stream.
void Generation::ObserveFirst() {
  (void)deliver_fault.Hit();
  EndStage(TtftStage::kDeliver);
  ttft_seconds_ = SecondsSince(arrived_);
  core_.metrics().ttft_seconds.Observe(ttft_seconds_);
  core_.metrics().ObserveStages(stages_);
  core_.planner().OnTtft(ttft_seconds_);
  receipt_.ttft_stages = stages_.ToMap();
}

void Generation::ObserveLatency() {
  const Clock::time_point now = Clock::now();
  if (started_output_) core_.metrics().inter_token_seconds.Observe(SecondsSince(last_output_));
  last_output_ = now;
}

bool Generation::AllFinished() const {
  return std::all_of(continuations_.begin(), continuations_.end(), [](const auto& c) { return c->finished(); });
}

void Generation::Resume() {
  Post([this] {
    if (done_ || !paused_) return;
    paused_ = false;
    if (attempt_ != nullptr && attempt_->prefilled && attempt_->stream != nullptr) attempt_->stream->ReadNext();
  });
}

// ---- end

void Generation::Cancel(absl::Status reason) {
  Post([this, reason = std::move(reason)] {
    if (!done_) Fail(reason);
  });
}

void Generation::Succeed() {
  const bool worker_knows =
      std::none_of(continuations_.begin(), continuations_.end(), [](const auto& c) { return c->stopped_by_string(); });
  if (worker_knows && attempt_ != nullptr) {
    // The decode worker ends the sequence and the stream by itself; only take note of it.
    if (attempt_->stream != nullptr) attempt_->stream->ReadNext();
    core_.breakers().OnNeither(attempt_->decode.worker_id);
    attempt_.reset();
  } else {
    Abandon("a stop string was found");
  }
  const uint32_t steps = completion_tokens_ / static_cast<uint32_t>(continuations_.size());
  if (steps > 1) core_.planner().OnTpot((SecondsSince(arrived_) - ttft_seconds_) / (steps - 1));
  core_.metrics().prompt_tokens.Increment(static_cast<double>(prompt_.size()));
  core_.metrics().prompt_tokens_per_request.Observe(static_cast<double>(prompt_.size()));
  core_.metrics().reuse_prefix_tokens.Increment(receipt_.cached_tokens);
  core_.metrics().reuse_segment_tokens.Increment(receipt_.aligned_tokens);
  core_.metrics().reuse_miss_tokens.Increment(static_cast<double>(prompt_.size()) - receipt_.cached_tokens -
                                              receipt_.aligned_tokens);
  Finish(absl::OkStatus());
}

void Generation::Fail(const absl::Status& status) {
  Abandon("the request ended");
  const std::shared_ptr<GenerationSink> sink = sink_;
  const bool left = status.code() == absl::StatusCode::kCancelled;
  if (left || status.code() == absl::StatusCode::kDeadlineExceeded) core_.metrics().cancellations.Increment();
  if (!left) core_.metrics().CountError(status.code());
  Finish(status);
  sink->OnError(status);
  core_.OnDelivered(id_);
}

void Generation::Finish(const absl::Status& status) {
  done_ = true;
  lease_.Take(completion_tokens_);
  lease_.Reset();
  deadline_timer_.cancel();
  retry_timer_.cancel();
  core_.metrics().e2e_seconds.Observe(SecondsSince(arrived_));
  LogLine(status);
  RecordTrace(status);
  core_.requests().End(id_, [&](RequestRecord& record) {
    Describe(record);
    record.status = status.ok() ? "OK" : status.ToString();
  });
  sink_.reset();
  core_.OnFinished(id_);
}

FinalInfo Generation::MakeFinal() const {
  FinalInfo final{.prompt_tokens = static_cast<uint32_t>(prompt_.size()),
                  .completion_tokens = completion_tokens_,
                  .receipt = receipt_};
  RequestReceipt& r = final.receipt;
  r.prompt_tokens = final.prompt_tokens;
  r.queue_seconds += queue_seconds_;
  r.ttft_seconds = ttft_seconds_;
  r.seed = request_.sampling.seed.value_or(0);
  r.attempts = attempts_;
  r.migrations = migrations_;
  // After a move the prompt's KV and the output's were computed by other workers, whose rounding may be another one
  // (other processors, other companions on a GPU): at a near tie the rest may be another text than the undisturbed one.
  r.exact = r.exact && migrations_ == 0;
  r.knowledge_bases = request_.knowledge_bases;
  return final;
}

void Generation::LogLine(const absl::Status& status) const {
  const std::string outcome = absl::StatusCodeToString(status.code());
  const std::string message = MessageOf(status);
  const std::string trace = request_.trace.TraceIdHex();
  log::Info("router.request", log::F("request", request_.request_id), log::F("trace", trace),
            log::F("api", request_.api), log::F("caller", request_.caller.name), log::F("status", outcome),
            log::F("message", message), log::F("prompt_tokens", prompt_.size()),
            log::F("cached_tokens", receipt_.cached_tokens), log::F("output_tokens", completion_tokens_),
            log::F("n", request_.sampling.n), log::F("queue_ms", queue_seconds_ * 1e3),
            log::F("ttft_ms", ttft_seconds_ * 1e3), log::F("e2e_ms", SecondsSince(arrived_) * 1e3),
            log::F("prefill", receipt_.prefill_worker), log::F("decode", receipt_.decode_worker),
            log::F("attempts", attempts_), log::F("migrations", migrations_));
}

void Generation::Note(const char* stage) {
  core_.requests().Update(id_, [&](RequestRecord& record) {
    record.stage = stage;
    Describe(record);
  });
}

void Generation::Describe(RequestRecord& record) const {
  record.reuse = request_.reuse.policy();
  if (attempt_ != nullptr) {
    record.prefill_worker = attempt_->prefill.process_id();
    record.decode_worker = attempt_->decode.worker_id;
  }
  record.queue_seconds = queue_seconds_;
  record.ttft_seconds = ttft_seconds_;
  record.ttft_stages = receipt_.ttft_stages;
  record.prompt_tokens = static_cast<uint32_t>(prompt_.size());
  record.cached_tokens = receipt_.cached_tokens + receipt_.aligned_tokens;
  record.completion_tokens = completion_tokens_;
  record.attempts = attempts_;
  record.migrations = migrations_;
}

double Generation::SecondsSince(Clock::time_point start) const {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace spl::router
