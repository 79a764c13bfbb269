#include "services/router/kb/knowledge_bases.h"

#include <algorithm>
#include <set>
#include <utility>

#include "services/base/ids.h"
#include "services/base/log.h"
#include "services/router/request/api_error.h"

namespace spl::router {
namespace {

absl::Status StateError(const char* code, const std::string& message) {
  return SetErrorCode(Errorf(absl::StatusCode::kFailedPrecondition, "{}", message), code);
}

absl::Status CheckNamespaceName(const std::string& name) {
  if (!name.empty() && name.size() <= kMaxNameBytes) return absl::OkStatus();
  return ParamError("name", "must have 1 to {} bytes, got {}", kMaxNameBytes, name.size());
}

// The stores know namespaces by their ids; the caller knows them by name.
absl::Status ForCaller(const absl::Status& status, const std::string& name) {
  if (status.code() == absl::StatusCode::kNotFound) {
    return SetErrorCode(Errorf(absl::StatusCode::kNotFound, "there is no namespace \"{}\"", name),
                        "namespace_not_found");
  }
  if (status.code() == absl::StatusCode::kAlreadyExists) {
    return SetErrorCode(Errorf(absl::StatusCode::kAlreadyExists, "namespace \"{}\" exists; change it instead", name),
                        "namespace_exists");
  }
  return status;
}

absl::Status PublicByName() {
  return ParamError("public", "follows from the name: public namespaces begin with \"public/\", and no others do");
}

CallerNamespace FromInfo(const chunk::NamespaceInfo& info, const std::string& name) {
  return {.name = name,
          .quota_bytes = info.settings.quota_bytes,
          .quota_chunks = info.settings.quota_chunks,
          .ttl_seconds = info.settings.ttl_seconds,
          .is_public = info.settings.is_public,
          .chunks = info.chunks,
          .bytes = info.bytes,
          .created_ms = info.created_ms,
          .implicit = info.implicit};
}

const KbVersion* LatestReady(const KbHead& head) {
  const auto found = std::find_if(head.versions.rbegin(), head.versions.rend(),
                                  [](const KbVersion& v) { return v.state == KbState::kReady; });
  return found == head.versions.rend() ? nullptr : &*found;
}

// Looks every knowledge base of one request up once.
class Resolver {
 public:
  Resolver(const KbCurrents& currents, const NamespaceKeys& keys, const Caller& caller)
      : currents_(currents), keys_(keys), caller_(caller) {}

  struct Found {
    std::shared_ptr<const KbCurrent> current;
    std::string namespace_key;
  };
  absl::StatusOr<const Found*> Find(const std::string& name, const std::string& field) {
    const auto known = found_.find(name);
    if (known != found_.end()) return &known->second;
    absl::Status status = CheckKbName(name);
    if (status.ok()) {
      const KbCache::Found& current = currents_.at(name);
      if (current.ok()) {
        const chunk::Digest key = keys_.DeriveKnowledgeBase(caller_, name, (*current)->version);
        std::string bytes(reinterpret_cast<const char*>(key.data()), key.size());
        return &found_.emplace(name, Found{*current, std::move(bytes)}).first->second;
      }
      status = current.status();
    }
    const std::string code = ErrorCodeOf(status);
    return SetErrorCode(SetParam(Annotate(status, field), field), code);
  }
  const std::map<std::string, Found>& found() const { return found_; }

 private:
  const KbCurrents& currents_;
  const NamespaceKeys& keys_;
  const Caller& caller_;
  std::map<std::string, Found> found_;
};

absl::Status ResolveSegment(Resolver& resolver, PromptSegment& segment) {
  if (segment.knowledge_base.empty()) return absl::OkStatus();
  const auto field = [&](const char* name) { return segment.field.empty() ? name : segment.field + "." + name; };
  SPLICE_ASSIGN_OR_RETURN(const Resolver::Found* const found,
                          resolver.Find(segment.knowledge_base, field("knowledge_base")));
  if (!segment.document.empty()) {
    const auto document = found->current->by_id.find(segment.document);
    if (document == found->current->by_id.end()) {
      return SetErrorCode(
          SetParam(Errorf(absl::StatusCode::kNotFound, "{}: version {} of knowledge base \"{}\" has no document \"{}\"",
                          field("document"), found->current->version, segment.knowledge_base, segment.document),
                   field("document")),
          "document_not_found");
    }
    segment.text = document->second->text;
  }
  segment.namespace_key = found->namespace_key;
  segment.frozen = true;
  return absl::OkStatus();
}

absl::Status ResolveMarks(Resolver& resolver, SegmentMarks& marks) {
  for (size_t i = 0; i < marks.size(); ++i) SPLICE_RETURN_IF_ERROR(ResolveSegment(resolver, marks[i]));
  return absl::OkStatus();
}

bool NamesAny(const SegmentMarks& marks) {
  for (size_t i = 0; i < marks.size(); ++i) {
    if (!marks[i].knowledge_base.empty()) return true;
  }
  return false;
}

bool NamesAny(const Prompt& prompt) {
  if (const auto* chat = std::get_if<ChatPrompt>(&prompt)) return NamesAny(chat->segments);
  if (const auto* text = std::get_if<SegmentedText>(&prompt)) return NamesAny(text->segments);
  const auto* const tokens = std::get_if<TokenizedPrompt>(&prompt);
  return tokens != nullptr && std::any_of(tokens->segments.begin(), tokens->segments.end(),
                                          [](const TokenSegment& s) { return !s.knowledge_base.empty(); });
}

// Those that the store is to be asked for.
std::set<std::string> NamesIn(const Prompt& prompt) {
  std::set<std::string> names;
  const auto add_all = [&](const SegmentMarks& marks) {
    for (size_t i = 0; i < marks.size(); ++i) names.insert(marks[i].knowledge_base);
  };
  if (const auto* chat = std::get_if<ChatPrompt>(&prompt)) add_all(chat->segments);
  if (const auto* text = std::get_if<SegmentedText>(&prompt)) add_all(text->segments);
  if (const auto* tokens = std::get_if<TokenizedPrompt>(&prompt)) {
    for (const TokenSegment& segment : tokens->segments) names.insert(segment.knowledge_base);
  }
  std::erase_if(names, [](const std::string& name) { return name.empty() || !CheckKbName(name).ok(); });
  return names;
}

}  // namespace

absl::StatusOr<std::unique_ptr<KnowledgeBases>> KnowledgeBases::Create(const KnowledgeBaseOptions& options,
                                                                       const ServedModel& model, const Fleet& fleet,
                                                                       const NamespaceKeys& keys, Metrics& metrics) {
  auto bases = std::unique_ptr<KnowledgeBases>(new KnowledgeBases(options, keys, metrics));
  if (options.store.empty()) return bases;
  SPLICE_ASSIGN_OR_RETURN(auto records, chunk::RecordClient::Connect(options.store, options.tls.get()));
  SPLICE_ASSIGN_OR_RETURN(auto namespaces, chunk::NamespaceClient::Connect(options.store, options.tls.get()));
  bases->store_ = std::make_unique<KbStore>(std::move(records), std::move(namespaces), options.store_timeout);
  bases->publisher_ = std::make_unique<KbPublisher>(*bases->store_, model, fleet, keys, options.publisher);
  bases->cache_ = std::make_unique<KbCache>(*bases->store_, options.cache);
  bases->lookups_ = std::make_unique<KbLookups>(options.lookup_threads, options.max_waiting_lookups);
  return bases;
}

KnowledgeBases::KnowledgeBases(const KnowledgeBaseOptions& options, const NamespaceKeys& keys, Metrics& metrics)
    : options_(options),
      keys_(keys),
      published_(metrics.Counter("splice_kb_publishes_total", "Versions of knowledge bases that were published.",
                                 {{"result", "ready"}})),
      publish_failed_(metrics.Counter("splice_kb_publishes_total", "Versions of knowledge bases that were published.",
                                      {{"result", "failed"}})) {}

absl::Status KnowledgeBases::CheckStore() const {
  if (store_ != nullptr) return absl::OkStatus();
  return Errorf(absl::StatusCode::kFailedPrecondition,
                "the router knows no chunk store; start it with --store HOST:PORT to use knowledge bases and the "
                "namespaces API");
}

void KnowledgeBases::Stop() {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  for (PublishControl* const control : running_) {
    control->Cancel(Errorf(absl::StatusCode::kUnavailable, "the router is shutting down"));
  }
  ended_.wait(lock, [this] { return running_.empty(); });
  lock.unlock();
  if (lookups_ != nullptr) lookups_->Stop();
  if (cache_ != nullptr) cache_->Stop();
}

void KnowledgeBases::Resolve(const Caller& caller, Prompt* prompt, std::map<std::string, uint64_t>* versions,
                             std::function<void(const absl::Status&)> done) {
  if (!NamesAny(*prompt)) return done(absl::OkStatus());
  if (const absl::Status none = CheckStore(); !none.ok()) return done(none);
  const std::set<std::string> names = NamesIn(*prompt);
  const chunk::Digest owner = keys_.DeriveOwner(caller);
  KbCurrents known;
  for (const std::string& name : names) {
    if (std::optional<KbCache::Found> current = cache_->Known(owner, name); current.has_value())
      known.emplace(name, *std::move(current));
  }
  if (known.size() == names.size()) return done(Fill(caller, known, prompt, versions));
  const auto ask = [this, caller, owner, names, prompt, versions, done] {
    KbCurrents currents;
    for (const std::string& name : names) currents.emplace(name, cache_->Current(owner, name));
    done(Fill(caller, currents, prompt, versions));
  };
  if (lookups_->TryPost(owner, ask)) return;
  done(SetRetryAfterMs(Errorf(absl::StatusCode::kResourceExhausted,
                              "too many requests wait to be told of their knowledge bases, or the router is stopping"),
                       1000));
}

absl::Status KnowledgeBases::Fill(const Caller& caller, const KbCurrents& currents, Prompt* prompt,
                                  std::map<std::string, uint64_t>* versions) const {
  Resolver resolver(currents, keys_, caller);
  if (auto* chat = std::get_if<ChatPrompt>(prompt)) {
    SPLICE_RETURN_IF_ERROR(ResolveMarks(resolver, chat->segments));
  } else if (auto* text = std::get_if<SegmentedText>(prompt)) {
    SPLICE_RETURN_IF_ERROR(ResolveMarks(resolver, text->segments));
  } else {
    std::vector<TokenSegment>& segments = std::get<TokenizedPrompt>(*prompt).segments;
    for (size_t i = 0; i < segments.size(); ++i) {
      if (segments[i].knowledge_base.empty()) continue;
      SPLICE_ASSIGN_OR_RETURN(
          const Resolver::Found* const found,
          resolver.Find(segments[i].knowledge_base, fmt::format("splice.segments[{}].knowledge_base", i)));
      segments[i].namespace_key = found->namespace_key;
      segments[i].frozen = true;
    }
  }
  for (const auto& [name, found] : resolver.found()) (*versions)[name] = found.current->version;
  return absl::OkStatus();
}

absl::StatusOr<KbVersion> KnowledgeBases::Publish(const Caller& caller, const PublishInput& input,
                                                  PublishControl& control) {
  SPLICE_RETURN_IF_ERROR(CheckPublishInput(input));
  SPLICE_RETURN_IF_ERROR(CheckStore());
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return Errorf(absl::StatusCode::kUnavailable, "the router is shutting down");
    running_.insert(&control);
  }
  const auto started = std::chrono::steady_clock::now();
  absl::StatusOr<KbVersion> version = publisher_->Publish(caller, input, control);
  (version.ok() ? published_ : publish_failed_).Increment();
  if (version.ok()) {
    cache_->Refresh(keys_.DeriveOwner(caller), input.name);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
    log::Info("router.kb_published", log::F("caller", caller.name), log::F("name", input.name),
              log::F("version", version->version), log::F("documents", version->documents),
              log::F("tokens", version->tokens), log::F("bytes", version->bytes), log::F("seconds", seconds.count()));
  }
  std::lock_guard lock(mutex_);
  running_.erase(&control);
  ended_.notify_all();
  return version;
}

absl::StatusOr<std::vector<KbHead>> KnowledgeBases::List(const Caller& caller) const {
  SPLICE_RETURN_IF_ERROR(CheckStore());
  SPLICE_ASSIGN_OR_RETURN(std::vector<KbHead> heads, store_->List(keys_.DeriveOwner(caller)));
  for (KbHead& head : heads) publisher_->MarkAbandoned(head);
  return heads;
}

absl::StatusOr<KbView> KnowledgeBases::Get(const Caller& caller, const std::string& name, uint64_t version) const {
  SPLICE_RETURN_IF_ERROR(CheckKbName(name));
  SPLICE_RETURN_IF_ERROR(CheckStore());
  const chunk::Digest owner = keys_.DeriveOwner(caller);
  SPLICE_ASSIGN_OR_RETURN(KbStore::Loaded loaded, store_->Load(owner, name));
  KbView view{.head = std::move(loaded.head)};
  publisher_->MarkAbandoned(view.head);
  const KbVersion* shown = version != 0 ? view.head.Find(version) : view.head.Find(view.head.current);
  if (version != 0 && shown == nullptr) return NoVersion(name, version);
  if (shown == nullptr) shown = LatestReady(view.head);
  if (shown == nullptr) return view;
  view.shown_version = shown->version;
  absl::StatusOr<std::shared_ptr<const KbContent>> content = store_->LoadContent(owner, name, *shown);
  // A version that is not ready may have no content.
  if (!content.ok() && (shown->state == KbState::kReady || content.status().code() != absl::StatusCode::kNotFound)) {
    return content.status();
  }
  if (content.ok()) view.content = *std::move(content);
  return view;
}

absl::StatusOr<KnowledgeBases::DiffResult> KnowledgeBases::Diff(const Caller& caller, const std::string& name,
                                                                uint64_t from, uint64_t to) const {
  SPLICE_RETURN_IF_ERROR(CheckKbName(name));
  SPLICE_RETURN_IF_ERROR(CheckStore());
  const chunk::Digest owner = keys_.DeriveOwner(caller);
  SPLICE_ASSIGN_OR_RETURN(const KbStore::Loaded loaded, store_->Load(owner, name));
  const KbHead& head = loaded.head;
  if (to == 0) to = head.current;
  if (to == 0) return StateError("knowledge_base_not_ready", "to: no version is current; name one");
  if (from == 0 && head.history.empty()) {
    return StateError("no_previous_version", "from: no version was current before; name one");
  }
  if (from == 0) from = head.history.back();
  const auto load = [&](uint64_t version) -> absl::StatusOr<std::shared_ptr<const KbContent>> {
    const KbVersion* const v = head.Find(version);
    if (v == nullptr) return NoVersion(name, version);
    return store_->LoadContent(owner, name, *v);
  };
  SPLICE_ASSIGN_OR_RETURN(const auto older, load(from));
  SPLICE_ASSIGN_OR_RETURN(const auto newer, load(to));
  return DiffResult{from, to, router::Diff(*older, *newer)};
}

absl::StatusOr<KbHead> KnowledgeBases::Swap(const Caller& caller, const std::string& name, uint64_t version) {
  SPLICE_RETURN_IF_ERROR(CheckKbName(name));
  SPLICE_RETURN_IF_ERROR(CheckStore());
  const chunk::Digest owner = keys_.DeriveOwner(caller);
  SPLICE_ASSIGN_OR_RETURN(KbHead head, store_->Change(owner, name, false, [&](KbHead& now) -> absl::Status {
    const KbVersion* const wanted = now.Find(version);
    if (wanted == nullptr) return NoVersion(name, version);
    if (wanted->state != KbState::kReady) {
      return StateError("version_not_ready", fmt::format("version {} of knowledge base \"{}\" is {}, not ready",
                                                         version, name, KbStateName(wanted->state)));
    }
    now.MakeCurrent(version);
    return absl::OkStatus();
  }));
  cache_->Refresh(owner, name);
  return head;
}

absl::StatusOr<KbHead> KnowledgeBases::Rollback(const Caller& caller, const std::string& name) {
  SPLICE_RETURN_IF_ERROR(CheckKbName(name));
  SPLICE_RETURN_IF_ERROR(CheckStore());
  const chunk::Digest owner = keys_.DeriveOwner(caller);
  SPLICE_ASSIGN_OR_RETURN(KbHead head, store_->Change(owner, name, false, [&](KbHead& now) -> absl::Status {
    if (now.history.empty()) {
      return StateError("no_previous_version",
                        fmt::format("no other version of knowledge base \"{}\" was current before", name));
    }
    now.current = now.history.back();
    now.history.pop_back();
    return absl::OkStatus();
  }));
  cache_->Refresh(owner, name);
  return head;
}

absl::StatusOr<chunk::NamespaceClient::Deleted> KnowledgeBases::DropVersions(
    const Caller& caller, const std::string& name, const std::vector<uint64_t>& versions) const {
  chunk::NamespaceClient::Deleted total;
  for (const uint64_t version : versions) {
    const chunk::Digest id = keys_.DeriveKnowledgeBase(caller, name, version);
    SPLICE_ASSIGN_OR_RETURN(const auto dropped, store_->DropVersion(keys_.DeriveOwner(caller), name, version, id));
    total.chunks += dropped.chunks;
    total.bytes += dropped.bytes;
  }
  return total;
}

absl::StatusOr<KnowledgeBases::Deleted> KnowledgeBases::Delete(const Caller& caller, const std::string& name,
                                                               uint64_t version) {
  SPLICE_RETURN_IF_ERROR(CheckKbName(name));
  SPLICE_RETURN_IF_ERROR(CheckStore());
  const chunk::Digest owner = keys_.DeriveOwner(caller);
  std::vector<uint64_t> doomed;
  uint64_t kv_bytes = 0;
  SPLICE_RETURN_IF_ERROR(
      store_
          ->Change(owner, name, false,
                   [&](KbHead& now) -> absl::Status {
                     doomed.clear();
                     kv_bytes = 0;
                     publisher_->MarkAbandoned(now);
                     if (version != 0 && now.Find(version) == nullptr) return NoVersion(name, version);
                     if (version != 0 && now.current == version)
                       return StateError("version_in_use", fmt::format("version {} of knowledge base \"{}\" is "
                                                                       "current; swap to another one first",
                                                                       version, name));
                     for (KbVersion& v : now.versions) {
                       if (version != 0 && v.version != version) continue;
                       if (v.state == KbState::kPublishing) {
                         return SetErrorCode(Errorf(absl::StatusCode::kAborted,
                                                    "version {} of knowledge base \"{}\" is being published; end "
                                                    "that first",
                                                    v.version, name),
                                             "publish_in_progress");
                       }
                       v.state = KbState::kFailed;
                       v.error = "it was being deleted";
                       doomed.push_back(v.version);
                       kv_bytes += v.bytes;
                     }
                     if (version == 0) now.current = 0;
                     for (const uint64_t v : doomed) std::erase(now.history, v);
                     return absl::OkStatus();
                   })
          .status());
  cache_->Refresh(owner, name);
  SPLICE_ASSIGN_OR_RETURN(const auto dropped, DropVersions(caller, name, doomed));
  const auto erase = [&](KbHead& now) {
    for (const uint64_t v : doomed) {
      const KbVersion* const found = now.Find(v);
      if (found != nullptr && found->state == KbState::kFailed) now.Erase(v);
    }
    return absl::OkStatus();
  };
  SPLICE_RETURN_IF_ERROR(store_->Change(owner, name, false, erase).status());
  if (version == 0) {
    SPLICE_ASSIGN_OR_RETURN(const KbStore::Loaded left, store_->Load(owner, name));
    // A publish that began meanwhile keeps it.
    if (left.head.versions.empty()) {
      const absl::Status gone = store_->DeleteHead(owner, name, left.revision);
      if (!gone.ok() && gone.code() != absl::StatusCode::kAborted) return gone;
    }
    cache_->Refresh(owner, name);
  }
  log::Info("router.kb_deleted", log::F("caller", caller.name), log::F("name", name), log::F("version", version),
            log::F("chunks", dropped.chunks));
  return Deleted{.versions = doomed.size(), .chunks = dropped.chunks, .bytes = dropped.bytes, .kv_bytes = kv_bytes};
}

// ---- plain namespaces

// Everybody derives the key of a public namespace; only who created it may change it.
absl::Status KnowledgeBases::CheckOwner(const Caller& caller, const chunk::NamespaceInfo& info,
                                        const std::string& name) const {
  if (!NamespaceKeys::IsPublic(name) || info.settings.owner == HexEncode(keys_.DeriveOwner(caller)))
    return absl::OkStatus();
  return SetErrorCode(Errorf(absl::StatusCode::kPermissionDenied, "namespace \"{}\" {}", name,
                             info.implicit ? "was never created: create it first" : "belongs to another caller"),
                      "not_the_owner");
}

absl::StatusOr<std::vector<CallerNamespace>> KnowledgeBases::ListNamespaces(const Caller& caller) const {
  SPLICE_RETURN_IF_ERROR(CheckStore());
  SPLICE_ASSIGN_OR_RETURN(const auto infos,
                          store_->namespaces().List(HexEncode(keys_.DeriveOwner(caller)), store_->Deadline()));
  std::vector<CallerNamespace> namespaces;
  for (const chunk::NamespaceInfo& info : infos) namespaces.push_back(FromInfo(info, info.settings.name));
  std::sort(namespaces.begin(), namespaces.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return namespaces;
}

absl::StatusOr<CallerNamespace> KnowledgeBases::CreateNamespace(const Caller& caller,
                                                                const CallerNamespace& wanted) const {
  SPLICE_RETURN_IF_ERROR(CheckNamespaceName(wanted.name));
  SPLICE_RETURN_IF_ERROR(CheckStore());
  const bool is_public = NamespaceKeys::IsPublic(wanted.name);
  if (wanted.is_public && !is_public) return PublicByName();
  if (is_public && !keys_.can_share(caller)) {
    return Errorf(absl::StatusCode::kFailedPrecondition,
                  "public namespaces need a router with --secret-file: from API keys alone no common key follows");
  }
  const auto made = store_->namespaces().Create(keys_.Derive(caller, wanted.name),
                                                {.name = wanted.name,
                                                 .owner = HexEncode(keys_.DeriveOwner(caller)),
                                                 .quota_bytes = wanted.quota_bytes,
                                                 .quota_chunks = wanted.quota_chunks,
                                                 .ttl_seconds = wanted.ttl_seconds,
                                                 .is_public = is_public},
                                                store_->Deadline());
  if (!made.ok()) return ForCaller(made.status(), wanted.name);
  return FromInfo(*made, wanted.name);
}

absl::StatusOr<CallerNamespace> KnowledgeBases::GetNamespace(const Caller& caller, const std::string& name) const {
  SPLICE_RETURN_IF_ERROR(CheckNamespaceName(name));
  SPLICE_RETURN_IF_ERROR(CheckStore());
  const auto info = store_->namespaces().Stat(keys_.Derive(caller, name), store_->Deadline());
  if (!info.ok()) return ForCaller(info.status(), name);
  return FromInfo(*info, name);
}

absl::StatusOr<CallerNamespace> KnowledgeBases::UpdateNamespace(const Caller& caller, const std::string& name,
                                                                const CallerNamespaceChange& change) const {
  SPLICE_RETURN_IF_ERROR(CheckNamespaceName(name));
  SPLICE_RETURN_IF_ERROR(CheckStore());
  const chunk::Digest id = keys_.Derive(caller, name);
  const auto before = store_->namespaces().Stat(id, store_->Deadline());
  if (!before.ok()) return ForCaller(before.status(), name);
  SPLICE_RETURN_IF_ERROR(CheckOwner(caller, *before, name));
  if (change.is_public.value_or(before->settings.is_public) != before->settings.is_public) return PublicByName();
  chunk::NamespaceSettings settings = before->settings;
  settings.name = name;
  settings.owner = HexEncode(keys_.DeriveOwner(caller));
  settings.quota_bytes = change.quota_bytes.value_or(settings.quota_bytes);
  settings.quota_chunks = change.quota_chunks.value_or(settings.quota_chunks);
  settings.ttl_seconds = change.ttl_seconds.value_or(settings.ttl_seconds);
  const auto set = store_->namespaces().Set(id, settings, store_->Deadline());
  if (!set.ok()) return ForCaller(set.status(), name);
  return FromInfo(*set, name);
}

absl::StatusOr<chunk::NamespaceClient::Deleted> KnowledgeBases::DeleteNamespace(const Caller& caller,
                                                                                const std::string& name) const {
  SPLICE_RETURN_IF_ERROR(CheckNamespaceName(name));
  SPLICE_RETURN_IF_ERROR(CheckStore());
  const chunk::Digest id = keys_.Derive(caller, name);
  const auto before = store_->namespaces().Stat(id, store_->Deadline());
  if (!before.ok()) return ForCaller(before.status(), name);
  SPLICE_RETURN_IF_ERROR(CheckOwner(caller, *before, name));
  auto deleted = store_->namespaces().Delete(id, store_->Deadline());
  if (!deleted.ok()) return ForCaller(deleted.status(), name);
  return deleted;
}

}  // namespace spl::router
