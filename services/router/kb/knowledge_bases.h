// Knowledge bases: named, versioned sets of documents of one caller, whose KV is computed once and kept in the chunk
// stores (docs/knowledge-bases.md). Also the caller's plain namespaces there.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/base/metrics.h"
#include "services/base/tls.h"
#include "services/chunk/remote/namespace_client.h"
#include "services/router/kb/kb_cache.h"
#include "services/router/kb/kb_lookups.h"
#include "services/router/kb/kb_publisher.h"
#include "services/router/request/request.h"

namespace spl::router {

struct KnowledgeBaseOptions {
  std::string store;                   // chunk stores, "HOST:PORT,…"; empty: none, every call is refused
  std::shared_ptr<const PeerTls> tls;  // null: stores are called without TLS
  std::chrono::milliseconds store_timeout{5'000};
  int lookup_threads = 4;           // requests that may wait for the store at once; one caller gets at most half
  size_t max_waiting_lookups = 64;  // per caller; more are refused
  KbCacheOptions cache;
  KbPublisherOptions publisher;
};

// A knowledge base as it is shown: abandoned versions count as failed; with the documents of one version.
struct KbView {
  KbHead head;
  uint64_t shown_version = 0;                // 0: none to show
  std::shared_ptr<const KbContent> content;  // content of the shown version
};

// One of the caller's namespaces, by the caller's name for it.
struct CallerNamespace {
  std::string name;
  uint64_t quota_bytes = 0;
  uint64_t quota_chunks = 0;
  uint64_t ttl_seconds = 0;
  bool is_public = false;
  uint64_t chunks = 0;
  uint64_t bytes = 0;
  uint64_t created_ms = 0;
  bool implicit = false;
};
struct CallerNamespaceChange {
  std::optional<uint64_t> quota_bytes, quota_chunks, ttl_seconds;
  std::optional<bool> is_public;
};

// By name, for one caller.
using KbCurrents = std::map<std::string, KbCache::Found>;

// Any thread may call. All calls except Resolve block on the stores, and Publish also on the workers: keep them off
// threads that serve requests. Everything is scoped to the caller: names are salted with keys that only the caller's
// identity derives. Borrows all arguments.
//
// Errors of all calls: FailedPrecondition names the flag: no store is configured. Unavailable names the store.
// InvalidArgument names the field. NotFound has one of the codes knowledge_base_not_found, version_not_found,
// document_not_found, namespace_not_found.
class KnowledgeBases {
 public:
  // InvalidArgument: malformed store addresses.
  static absl::StatusOr<std::unique_ptr<KnowledgeBases>> Create(const KnowledgeBaseOptions& options,
                                                                const ServedModel& model, const Fleet& fleet,
                                                                const NamespaceKeys& keys, Metrics& metrics);
  ~KnowledgeBases() { Stop(); }

  // Fills in a prompt's references to knowledge bases: texts of documents, keys, and in `versions` the versions that
  // were read. Each knowledge base is looked up once, so that all of a request comes from one version of it. Does
  // nothing for prompts without references. Never blocks.
  //
  // Calls `done` once: before it returns, or, if the store must be asked (the first request for a knowledge base, or
  // the first after a while), on a thread of its own. `prompt` and `versions` must live until then. ResourceExhausted:
  // too many prompts of the caller wait for the store, or it is stopping.
  void Resolve(const Caller& caller, Prompt* prompt, std::map<std::string, uint64_t>* versions,
               std::function<void(const absl::Status&)> done);

  // See KbPublisher. Stop cancels it.
  absl::StatusOr<KbVersion> Publish(const Caller& caller, const PublishInput& input, PublishControl& control);
  absl::StatusOr<std::vector<KbHead>> List(const Caller& caller) const;
  // `version` 0: the current one, otherwise the latest ready one, if any.
  absl::StatusOr<KbView> Get(const Caller& caller, const std::string& name, uint64_t version) const;
  struct DiffResult {
    uint64_t from = 0, to = 0;
    KbDiff diff;
  };
  // 0 for `from`: the previously current version; 0 for `to`: the current one.
  absl::StatusOr<DiffResult> Diff(const Caller& caller, const std::string& name, uint64_t from, uint64_t to) const;
  // Returns the head afterwards. FailedPrecondition ("version_not_ready", "no_previous_version").
  absl::StatusOr<KbHead> Swap(const Caller& caller, const std::string& name, uint64_t version);
  absl::StatusOr<KbHead> Rollback(const Caller& caller, const std::string& name);
  // The chunks that were dropped are those of the KV, which publishing counted (KbVersion), and behind them summaries
  // and four-bit copies of it.
  struct Deleted {
    uint64_t versions = 0;
    uint64_t chunks = 0;
    uint64_t bytes = 0;     // freed in the stores
    uint64_t kv_bytes = 0;  // KV of the versions, as publishing counted it
  };
  // `version` 0: all of it. The version stops being served before its chunks are dropped. An interrupted deletion
  // leaves failed versions behind and may be repeated. FailedPrecondition ("version_in_use"): it is current. Aborted
  // ("publish_in_progress"): a publish is running.
  absl::StatusOr<Deleted> Delete(const Caller& caller, const std::string& name, uint64_t version);

  absl::StatusOr<std::vector<CallerNamespace>> ListNamespaces(const Caller& caller) const;
  // AlreadyExists: it exists. FailedPrecondition: a public one, and callers have no key in common.
  absl::StatusOr<CallerNamespace> CreateNamespace(const Caller& caller, const CallerNamespace& wanted) const;
  absl::StatusOr<CallerNamespace> GetNamespace(const Caller& caller, const std::string& name) const;
  absl::StatusOr<CallerNamespace> UpdateNamespace(const Caller& caller, const std::string& name,
                                                  const CallerNamespaceChange& change) const;
  absl::StatusOr<chunk::NamespaceClient::Deleted> DeleteNamespace(const Caller& caller, const std::string& name) const;

  bool has_store() const { return store_ != nullptr; }
  // Refuses further publishes, cancels the running ones and waits for them. Idempotent.
  void Stop();

 private:
  KnowledgeBases(const KnowledgeBaseOptions& options, const NamespaceKeys& keys, Metrics& metrics);
  absl::Status CheckStore() const;
  absl::Status Fill(const Caller& caller, const KbCurrents& currents, Prompt* prompt,
                    std::map<std::string, uint64_t>* versions) const;
  absl::Status CheckOwner(const Caller& caller, const chunk::NamespaceInfo& info, const std::string& name) const;
  absl::StatusOr<chunk::NamespaceClient::Deleted> DropVersions(const Caller& caller, const std::string& name,
                                                               const std::vector<uint64_t>& versions) const;

  const KnowledgeBaseOptions options_;
  const NamespaceKeys& keys_;
  prometheus::Counter& published_;
  prometheus::Counter& publish_failed_;
  std::unique_ptr<KbStore> store_;  // null without --store; then the next three are null too
  std::unique_ptr<KbPublisher> publisher_;
  std::unique_ptr<KbCache> cache_;
  std::unique_ptr<KbLookups> lookups_;

  std::mutex mutex_;  // guards all below
  std::condition_variable ended_;
  std::set<PublishControl*> running_;
  bool stopping_ = false;
};

}  // namespace spl::router
