#include "services/router/kb/kb_publisher.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>

#include "services/base/ids.h"
#include "services/base/log.h"
#include "services/router/fleet/workers.h"
#include "services/router/kb/canonical_contexts.h"
#include "services/router/request/api_error.h"

namespace spl::router {
namespace {

using Time = std::chrono::steady_clock::time_point;
using PublishCall = UnaryCall<v1::PublishRequest, v1::PublishResponse>;

constexpr std::chrono::milliseconds kSlowestBeat{1'000};

uint64_t UnixMs() {
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(since).count());
}

absl::Status TakenOver(const std::string& name, const KbVersion& version) {
  return SetErrorCode(Errorf(absl::StatusCode::kAborted,
                             "version {} of knowledge base \"{}\" was taken for failed and dropped by another router",
                             version.version, name),
                      "publish_in_progress");
}

// The version as its publisher left it. Null: another process took it away.
KbVersion* Mine(KbHead& head, const KbVersion& version) {
  KbVersion* const found = head.Find(version.version);
  return found != nullptr && found->uid == version.uid && found->state == KbState::kPublishing ? found : nullptr;
}

}  // namespace

void PublishControl::Cancel(absl::Status reason) {
  std::lock_guard lock(mutex_);
  if (reason_.ok()) reason_ = std::move(reason);
  changed_.notify_all();
}

absl::Status PublishControl::cancelled() const {
  std::lock_guard lock(mutex_);
  return reason_;
}

absl::Status CheckPublishInput(const PublishInput& input) {
  SPLICE_RETURN_IF_ERROR(CheckKbName(input.name));
  if (input.documents.empty()) return ParamError("documents", "must hold at least one document");
  if (input.documents.size() > kMaxKbDocuments) {
    return ParamError("documents", "a version may have {} at most, got {}", kMaxKbDocuments, input.documents.size());
  }
  std::set<std::string_view> ids;
  for (size_t i = 0; i < input.documents.size(); ++i) {
    const auto& [id, text] = input.documents[i];
    const std::string field = fmt::format("documents[{}].", i);
    if (id.empty() || id.size() > kMaxKbDocumentIdBytes) {
      return ParamError(field + "id", "must have 1 to {} bytes, got {}", kMaxKbDocumentIdBytes, id.size());
    }
    if (text.empty()) return ParamError(field + "text", "of document \"{}\" is empty", id);
    if (!ids.insert(id).second) return ParamError(field + "id", "\"{}\" stands in the list twice", id);
  }
  return absl::OkStatus();
}

// The contexts to compute, and their manifest.
struct KbPublisher::Prepared {
  struct Context {
    std::vector<uint32_t> token_ids;
    std::vector<std::pair<uint32_t, uint32_t>> segments;  // [begin, end) of each document
  };
  std::string fingerprint;  // model fingerprint, hex
  KbContent content;
  std::vector<Context> contexts;
  PublishProgress total;  // with nothing done
  uint64_t document_tokens = 0;
};

struct KbPublisher::Result {
  uint64_t chunks = 0;
  uint64_t bytes = 0;
  double prefill_seconds = 0;
};

absl::StatusOr<KbPublisher::Prepared> KbPublisher::Prepare(const PublishInput& input,
                                                           const FleetSnapshot& fleet) const {
  if (!fleet.model.known) return Errorf(absl::StatusCode::kUnavailable, "no prefill worker is connected");
  // As long as a request's prompt may be: the context minus one output token, and at most the capacity of some worker.
  uint64_t limit =
      std::max<uint64_t>(fleet.model.max_context > 0 ? fleet.model.max_context : model_.max_context(), 1) - 1;
  uint64_t room = 0;
  for (const PrefillView& p : fleet.prefill)
    room = std::max(room, p.max_prompt_tokens == 0 ? limit : p.max_prompt_tokens);
  limit = std::min(limit, room);
  if (options_.context_tokens > 0) limit = std::min(limit, options_.context_tokens);

  Prepared prepared;
  prepared.fingerprint = HexEncode(fleet.model.fingerprint);
  prepared.content.instruction = input.instruction;
  absl::StatusOr<std::vector<TokenId>> prefix = model_.EncodeStart(input.instruction);
  if (!prefix.ok()) return SetParam(Annotate(prefix.status(), "instruction"), "instruction");
  if (prefix->size() >= limit) {
    return ParamError("instruction", "has {} tokens, but a context holds {}", prefix->size(), limit);
  }

  // The same text twice is computed once: it would have the same keys.
  std::map<std::string, size_t> known;  // SHA-256 → index in `tokens`
  std::vector<std::vector<TokenId>> tokens;
  std::vector<uint64_t> lengths;
  std::vector<size_t> unique_of;
  for (size_t i = 0; i < input.documents.size(); ++i) {
    const auto& [id, text] = input.documents[i];
    const std::string field = fmt::format("documents[{}].text", i);
    KbDocument document{.id = id, .text = text, .sha256 = Sha256Hex(text)};
    const auto [found, is_new] = known.emplace(document.sha256, tokens.size());
    if (is_new) {
      absl::StatusOr<std::vector<TokenId>> ids = model_.EncodeSegment(text);
      if (!ids.ok()) return SetParam(Annotate(ids.status(), field), field);
      if (ids->empty()) return ParamError(field, "of document \"{}\" has no tokens", id);
      if (prefix->size() + ids->size() > limit) {
        return ParamError(field,
                          "document \"{}\" has {} tokens, but a context of {} leaves it {} behind the instruction; "
                          "split it",
                          id, ids->size(), limit, limit - prefix->size());
      }
      lengths.push_back(ids->size());
      tokens.push_back(*std::move(ids));
    }
    unique_of.push_back(found->second);
    document.tokens = lengths[found->second];
    prepared.document_tokens += document.tokens;
    prepared.content.documents.push_back(std::move(document));
  }

  std::vector<uint64_t> context_of(tokens.size());
  for (const std::vector<size_t>& members :
       input.together ? PackContexts(lengths, prefix->size(), limit) : SeparateContexts(lengths.size())) {
    Prepared::Context context;
    context.token_ids.assign(prefix->begin(), prefix->end());
    for (const size_t i : members) {
      const auto begin = static_cast<uint32_t>(context.token_ids.size());
      context.token_ids.insert(context.token_ids.end(), tokens[i].begin(), tokens[i].end());
      context.segments.emplace_back(begin, static_cast<uint32_t>(context.token_ids.size()));
      context_of[i] = prepared.contexts.size();
    }
    prepared.total.tokens += context.token_ids.size();
    prepared.contexts.push_back(std::move(context));
  }
  prepared.total.contexts = prepared.contexts.size();
  for (size_t i = 0; i < unique_of.size(); ++i) prepared.content.documents[i].context = context_of[unique_of[i]];
  const size_t manifest_bytes = ToJson(prepared.content).size() + 64;  // its uid is not in yet
  if (manifest_bytes > kMaxKbManifestBytes) {
    return ParamError("documents", "together they take {} bytes as JSON, a version may have {}; make several of it",
                      manifest_bytes, kMaxKbManifestBytes);
  }
  return prepared;
}

void KbPublisher::MarkAbandoned(KbHead& head) const {
  const auto timeout_ms = static_cast<uint64_t>(options_.publisher_timeout.count());
  for (KbVersion& v : head.versions) {
    if (v.state != KbState::kPublishing || v.heartbeat_ms + timeout_ms > UnixMs()) continue;
    v.state = KbState::kFailed;
    v.error = "its publisher was not heard of any more";
  }
}

absl::StatusOr<KbVersion> KbPublisher::Claim(const chunk::Digest& owner, const PublishInput& input,
                                             const Prepared& prepared) const {
  if (store_.Load(owner, input.name).status().code() == absl::StatusCode::kNotFound) {
    SPLICE_ASSIGN_OR_RETURN(const size_t count, store_.Count(owner));
    if (count >= options_.max_knowledge_bases) {
      return Errorf(absl::StatusCode::kResourceExhausted, "{} knowledge bases exist, at most {}; delete some", count,
                    options_.max_knowledge_bases);
    }
  }
  KbVersion mine{.state = KbState::kPublishing,
                 .uid = RandomId::Make().ToHex(),
                 .model_fingerprint = prepared.fingerprint,
                 .documents = prepared.content.documents.size(),
                 .tokens = prepared.document_tokens,
                 .contexts = prepared.total.contexts};
  SPLICE_RETURN_IF_ERROR(
      store_
          .Change(owner, input.name, true,
                  [&](KbHead& head) -> absl::Status {
                    MarkAbandoned(head);
                    for (const KbVersion& v : head.versions) {
                      if (v.state != KbState::kPublishing) continue;
                      return SetErrorCode(Errorf(absl::StatusCode::kAborted,
                                                 "version {} of knowledge base \"{}\" is being published; wait for "
                                                 "it, or for its publisher to be given up after {} s",
                                                 v.version, input.name, options_.publisher_timeout.count() / 1000),
                                          "publish_in_progress");
                    }
                    const auto kept = std::count_if(head.versions.begin(), head.versions.end(),
                                                    [](const KbVersion& v) { return v.state != KbState::kFailed; });
                    if (static_cast<size_t>(kept) >= kMaxKbVersions) {
                      return Errorf(absl::StatusCode::kResourceExhausted,
                                    "knowledge base \"{}\" has {} versions, at most {}; delete some", input.name, kept,
                                    kMaxKbVersions);
                    }
                    // Once durable, always: no change of the head may undo it.
                    head.durable = input.durable || (head.durable && !head.versions.empty());
                    mine.version = head.next_version++;
                    mine.created_ms = mine.heartbeat_ms = UnixMs();
                    head.versions.push_back(mine);
                    return absl::OkStatus();
                  })
          .status());
  return mine;
}

// Drops failed versions of earlier publishes, with their stored data.
absl::Status KbPublisher::Collect(const Caller& caller, const std::string& name) const {
  const chunk::Digest owner = keys_.DeriveOwner(caller);
  absl::StatusOr<KbStore::Loaded> loaded = store_.Load(owner, name);
  if (!loaded.ok()) return loaded.status().code() == absl::StatusCode::kNotFound ? absl::OkStatus() : loaded.status();
  std::set<std::string> dropped;  // uids
  for (const KbVersion& v : loaded->head.versions) {
    if (v.state != KbState::kFailed) continue;
    const chunk::Digest id = keys_.DeriveKnowledgeBase(caller, name, v.version);
    SPLICE_RETURN_IF_ERROR(store_.DropVersion(owner, name, v.version, id).status());
    dropped.insert(v.uid);
  }
  if (dropped.empty()) return absl::OkStatus();
  return store_
      .Change(owner, name, false,
              [&](KbHead& head) {
                std::vector<uint64_t> gone;
                for (const KbVersion& v : head.versions) {
                  if (dropped.count(v.uid) != 0 && v.state != KbState::kReady) gone.push_back(v.version);
                }
                for (const uint64_t version : gone) head.Erase(version);
                return absl::OkStatus();
              })
      .status();
}

absl::Status KbPublisher::Beat(const chunk::Digest& owner, const std::string& name, const KbVersion& version) const {
  return store_
      .Change(owner, name, false,
              [&](KbHead& head) {
                KbVersion* const mine = Mine(head, version);
                if (mine == nullptr) return TakenOver(name, version);
                mine->heartbeat_ms = UnixMs();
                return absl::OkStatus();
              })
      .status();
}

// One publish at work on its contexts: a few at a time, each on one worker after the other while they are unavailable.
class KbPublisher::ContextRun {
 public:
  ContextRun(const KbPublisher& publisher, const chunk::Digest& owner, const chunk::Digest& namespace_key,
             const PublishInput& input, const Prepared& prepared, const KbVersion& version, PublishControl& control)
      : publisher_(publisher),
        options_(publisher.options_),
        owner_(owner),
        namespace_key_(reinterpret_cast<const char*>(namespace_key.data()), namespace_key.size()),
        input_(input),
        prepared_(prepared),
        version_(version),
        control_(control),
        progress_(prepared.total) {}

  absl::StatusOr<Result> All() {
    control_.on_progress_(progress_);
    const absl::Status status = Run();
    // Not before every call has ended: they report to `control_`.
    for (const Running& running : running_) running.call->Cancel();
    std::unique_lock lock(control_.mutex_);
    control_.changed_.wait(lock, [&] {
      return std::all_of(running_.begin(), running_.end(), [](const Running& r) { return r.answer->done; });
    });
    if (!status.ok()) return status;
    return result_;
  }

 private:
  struct Waiting {
    const Prepared::Context* context;
    int attempts = 0;
    Time not_before;
    std::set<std::string> failed;  // workers
  };
  struct Answer {
    bool done = false;
    absl::Status status;
    v1::PublishResponse response;
  };
  struct Running {
    Waiting what;
    std::string worker_id;
    std::shared_ptr<PublishCall> call;
    std::shared_ptr<Answer> answer;  // guarded by control_.mutex_
  };

  absl::Status Run() {
    size_t next = 0;  // index into prepared_.contexts
    while (progress_.contexts_done < progress_.contexts) {
      SPLICE_RETURN_IF_ERROR(control_.cancelled());
      const Time now = std::chrono::steady_clock::now();
      const auto due_from = std::partition(retries_.begin(), retries_.end(),
                                           [&](const Waiting& retry) { return retry.not_before > now; });
      std::vector<Waiting> due(std::make_move_iterator(due_from), std::make_move_iterator(retries_.end()));
      retries_.erase(due_from, retries_.end());
      for (Waiting& retry : due) SPLICE_RETURN_IF_ERROR(Start(std::move(retry)));
      const size_t limit =
          options_.contexts_per_worker * std::max<size_t>(publisher_.fleet_.snapshot()->prefill.size(), 1);
      while (next < prepared_.contexts.size() && running_.size() + retries_.size() < limit)
        SPLICE_RETURN_IF_ERROR(Start({.context = &prepared_.contexts[next++]}));
      Time wake = Time::max();
      for (const Waiting& retry : retries_) wake = std::min(wake, retry.not_before);
      SPLICE_RETURN_IF_ERROR(Wait(wake));
      SPLICE_RETURN_IF_ERROR(TakeAnswers());
    }
    return absl::OkStatus();
  }

  absl::Status Start(Waiting what) {
    ++what.attempts;
    const absl::StatusOr<PrefillView> worker = Choose(what);
    if (!worker.ok()) return AgainAfter(worker.status(), "", std::move(what));
    Running running{std::move(what), worker->worker_id, std::make_shared<PublishCall>(), std::make_shared<Answer>()};
    running.call->request = RequestFor(*running.what.context);
    const Time deadline = std::chrono::steady_clock::now() + options_.context_timeout;
    PublishCall::Start(
        running.call, *worker->worker, &v1::Prefill::Stub::async_interface::Publish, deadline,
        [&control = control_, answer = running.answer](const absl::Status& status, PublishCall& finished) {
          std::lock_guard lock(control.mutex_);
          answer->done = true;
          answer->status = status;
          answer->response.Swap(&finished.response);
          control.changed_.notify_all();
        });
    running_.push_back(std::move(running));
    return absl::OkStatus();
  }

  // Retries once more, later, a context that found a worker unavailable (`worker_id`; "": there was none). Any other
  // error is final.
  absl::Status AgainAfter(const absl::Status& status, const std::string& worker_id, Waiting what) {
    if (status.code() != absl::StatusCode::kUnavailable || what.attempts >= options_.max_attempts) return status;
    log::Warning("router.kb_context_retry", log::F("attempt", what.attempts), log::F("cause", status));
    if (!worker_id.empty()) what.failed.insert(worker_id);
    what.not_before = std::chrono::steady_clock::now() + options_.retry_backoff * what.attempts;
    retries_.push_back(std::move(what));
    return absl::OkStatus();
  }

  // Where the cluster has no room is the operator's business: addresses and paths stay in the log. Without a quota the
  // caller has used up nothing.
  absl::Status ForCaller(const absl::Status& status) const {
    if (status.code() != absl::StatusCode::kResourceExhausted) return status;
    log::Warning("router.kb_no_room", log::F("name", input_.name), log::F("cause", status));
    if (options_.quota_bytes == 0)
      return Errorf(absl::StatusCode::kUnavailable,
                    "there is no room for the documents: a store is full, or the workers have too much to do");
    return Errorf(absl::StatusCode::kResourceExhausted,
                  "there is no room for the documents: a version may have {} bytes on a store, or a store is full",
                  options_.quota_bytes);
  }

  absl::Status TakeAnswers() {
    for (size_t i = 0; i < running_.size();) {
      {
        std::lock_guard lock(control_.mutex_);
        if (!running_[i].answer->done) {
          ++i;
          continue;
        }
      }
      Running ended = std::move(running_[i]);
      running_.erase(running_.begin() + static_cast<ptrdiff_t>(i));
      const absl::Status& status = ended.answer->status;
      if (!status.ok()) {
        const std::string where = "prefill on " + ended.worker_id;
        SPLICE_RETURN_IF_ERROR(ForCaller(AgainAfter(Annotate(status, where), ended.worker_id, std::move(ended.what))));
        continue;
      }
      const v1::PublishResponse& response = ended.answer->response;
      result_.chunks += response.chunks();
      result_.bytes += response.bytes();
      result_.prefill_seconds += response.prefill_seconds();
      ++progress_.contexts_done;
      progress_.tokens_done += ended.what.context->token_ids.size();
      control_.on_progress_(progress_);
    }
    return Beat();
  }

  // The least loaded worker that takes a context of this length; one that has failed with it only when all have.
  absl::StatusOr<PrefillView> Choose(const Waiting& what) const {
    const size_t length = what.context->token_ids.size();
    const std::shared_ptr<const FleetSnapshot> fleet = publisher_.fleet_.snapshot();
    if (fleet->model.known && HexEncode(fleet->model.fingerprint) != prepared_.fingerprint) {
      return Errorf(absl::StatusCode::kAborted, "the workers serve another model since this publish began; try again");
    }
    std::map<std::string, uint64_t> mine;  // tokens that run for this publish, which reports of load may lack yet
    for (const Running& r : running_) mine[r.worker_id] += r.what.context->token_ids.size();
    const auto cost = [&](const PrefillView& p) {
      const auto found = mine.find(p.worker_id);
      return std::pair(what.failed.count(p.worker_id), p.queued_tokens + (found == mine.end() ? 0 : found->second));
    };
    const PrefillView* best = nullptr;
    for (const PrefillView& p : fleet->prefill) {
      if (p.draining || (p.max_prompt_tokens != 0 && p.max_prompt_tokens < length)) continue;
      if (best == nullptr || cost(p) < cost(*best)) best = &p;
    }
    if (best == nullptr) {
      return Errorf(absl::StatusCode::kUnavailable, "no prefill worker takes a context of {} tokens now", length);
    }
    return *best;
  }

  v1::PublishRequest RequestFor(const Prepared::Context& context) const {
    v1::PublishRequest request;
    request.set_request_id(version_.uid);
    request.mutable_token_ids()->Add(context.token_ids.begin(), context.token_ids.end());
    for (const auto& [begin, end] : context.segments) {
      v1::TokenSegment& segment = *request.add_segments();
      segment.set_begin(begin);
      segment.set_end(end);
      segment.set_namespace_key(namespace_key_);
      segment.set_frozen(true);
    }
    request.set_pin(v1::PIN_HARD);
    request.set_durable(input_.durable);
    return request;
  }

  // Until a call has ended or the time, beating. An error: cancelled, or taken over.
  absl::Status Wait(Time until) {
    const auto step = std::min<std::chrono::milliseconds>(kSlowestBeat, options_.heartbeat);
    const auto ended = [&] {
      return std::any_of(running_.begin(), running_.end(), [](const Running& r) { return r.answer->done; });
    };
    std::unique_lock lock(control_.mutex_);
    while (!ended() && std::chrono::steady_clock::now() < until) {
      if (!control_.reason_.ok()) return control_.reason_;
      control_.changed_.wait_until(lock, std::min(until, std::chrono::steady_clock::now() + step));
      lock.unlock();
      SPLICE_RETURN_IF_ERROR(Beat());
      lock.lock();
    }
    return absl::OkStatus();
  }

  // Tells the others now and then that this publisher lives. A store that is away for a moment is no reason to stop;
  // having been taken for dead is.
  absl::Status Beat() {
    if (std::chrono::steady_clock::now() < last_beat_ + options_.heartbeat) return absl::OkStatus();
    last_beat_ = std::chrono::steady_clock::now();
    absl::Status status = publisher_.Beat(owner_, input_.name, version_);
    if (status.code() != absl::StatusCode::kUnavailable && status.code() != absl::StatusCode::kDeadlineExceeded) {
      return status;
    }
    log::Warning("router.kb_heartbeat_failed", log::F("cause", status));
    return absl::OkStatus();
  }

  const KbPublisher& publisher_;
  const KbPublisherOptions& options_;
  const chunk::Digest owner_;
  const std::string namespace_key_;
  const PublishInput& input_;
  const Prepared& prepared_;
  const KbVersion& version_;
  PublishControl& control_;
  Time last_beat_ = std::chrono::steady_clock::now();
  std::vector<Running> running_;
  std::vector<Waiting> retries_;
  PublishProgress progress_;
  Result result_;
};

absl::StatusOr<KbPublisher::Result> KbPublisher::Compute(const Caller& caller, const PublishInput& input,
                                                         const Prepared& prepared, const KbVersion& version,
                                                         PublishControl& control) const {
  const chunk::Digest owner = keys_.DeriveOwner(caller);
  const chunk::Digest namespace_key = keys_.DeriveKnowledgeBase(caller, input.name, version.version);
  SPLICE_RETURN_IF_ERROR(store_.CreateNamespace(namespace_key, {.name = KbContentRecord(input.name, version.version),
                                                                .owner = HexEncode(owner) + "/kb",
                                                                .quota_bytes = options_.quota_bytes}));
  KbContent content = prepared.content;
  content.uid = version.uid;
  SPLICE_RETURN_IF_ERROR(store_.SaveContent(owner, input.name, version.version, input.durable, content));
  return ContextRun(*this, owner, namespace_key, input, prepared, version, control).All();
}

absl::StatusOr<KbVersion> KbPublisher::Finish(const chunk::Digest& owner, const PublishInput& input,
                                              const KbVersion& version, const Result& result) const {
  KbVersion ready;
  SPLICE_RETURN_IF_ERROR(store_
                             .Change(owner, input.name, false,
                                     [&](KbHead& head) {
                                       KbVersion* const mine = Mine(head, version);
                                       if (mine == nullptr) return TakenOver(input.name, version);
                                       mine->state = KbState::kReady;
                                       mine->heartbeat_ms = UnixMs();
                                       mine->chunks = result.chunks;
                                       mine->bytes = result.bytes;
                                       mine->prefill_seconds = result.prefill_seconds;
                                       if (input.swap) head.MakeCurrent(version.version);
                                       ready = *mine;
                                       return absl::OkStatus();
                                     })
                             .status());
  return ready;
}

// As much as can be done; the next publish does the rest.
void KbPublisher::Fail(const Caller& caller, const std::string& name, const KbVersion& version,
                       const absl::Status& status) const {
  const chunk::Digest owner = keys_.DeriveOwner(caller);
  const absl::Status noted = store_
                                 .Change(owner, name, false,
                                         [&](KbHead& head) {
                                           KbVersion* const mine = Mine(head, version);
                                           if (mine == nullptr) return TakenOver(name, version);
                                           mine->state = KbState::kFailed;
                                           mine->error = MessageOf(status);
                                           return absl::OkStatus();
                                         })
                                 .status();
  log::Warning("router.kb_publish_failed", log::F("name", name), log::F("version", version.version),
               log::F("cause", status), log::F("noted", noted.ok()));
  if (!noted.ok()) return;
  const chunk::Digest id = keys_.DeriveKnowledgeBase(caller, name, version.version);
  const auto dropped = store_.DropVersion(owner, name, version.version, id);
  if (!dropped.ok()) log::Warning("router.kb_not_dropped", log::F("name", name), log::F("cause", dropped.status()));
}

absl::StatusOr<KbVersion> KbPublisher::Publish(const Caller& caller, const PublishInput& input,
                                               PublishControl& control) const {
  SPLICE_RETURN_IF_ERROR(CheckPublishInput(input));
  const chunk::Digest owner = keys_.DeriveOwner(caller);
  const std::shared_ptr<const FleetSnapshot> fleet = fleet_.snapshot();
  SPLICE_ASSIGN_OR_RETURN(const Prepared prepared, Prepare(input, *fleet));
  SPLICE_RETURN_IF_ERROR(control.cancelled());
  SPLICE_ASSIGN_OR_RETURN(const KbVersion version, Claim(owner, input, prepared));
  // We clean up what is claimed: no other publisher is at work, and an abandoned version is marked as failed.
  const absl::Status collected = Collect(caller, input.name);
  absl::StatusOr<Result> result =
      collected.ok() ? Compute(caller, input, prepared, version, control) : absl::StatusOr<Result>(collected);
  absl::StatusOr<KbVersion> ready =
      result.ok() ? Finish(owner, input, version, *result) : absl::StatusOr<KbVersion>(result.status());
  if (!ready.ok()) Fail(caller, input.name, version, ready.status());
  return ready;
}

}  // namespace spl::router
