// Knowledge bases: named, versioned sets of documents of one caller, whose KV is computed once and kept in the chunk
// stores (docs/knowledge-bases.md). And the caller's plain namespaces there.
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
  std::shared_ptr<const PeerTls> tls;  // null: stores are called without
  std::chrono::milliseconds store_timeout{5'000};
  int lookup_threads = 4;           // requests that wait for the store at once, half of them one caller's at most
  size_t max_waiting_lookups = 64;  // of one caller; more are refused
  KbCacheOptions cache;
  KbPublisherOptions publisher;
};

// A knowledge base as it is shown: abandoned versions as failed, and the documents of one version.
struct KbView {
  KbHead head;
  uint64_t shown_version = 0;                // 0: none to show
  std::shared_ptr<const KbContent> content;  // of the shown version
};

// A namespace of the caller, by the caller's name for it.
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

// Any thread may call. All calls but Resolve block on the stores, Publish also on the workers, for as long as that
// takes: keep them off threads that serve requests. Everything is scoped to the caller: names are salted with what only
// the caller's identity derives. Borrows what it is given.
//
// Errors of all calls: FailedPrecondition without a store, naming the flag; Unavailable naming the store;
// InvalidArgument naming the field; NotFound with one of the codes knowledge_base_not_found, version_not_found,
// document_not_found, namespace_not_found.
class KnowledgeBases {
 public:
  // InvalidArgument: malformed store addresses.
  static absl::StatusOr<std::unique_ptr<KnowledgeBases>> Create(const KnowledgeBaseOptions& options,
                                                                const ServedModel& model, const Fleet& fleet,
                                                                const NamespaceKeys& keys, Metrics& metrics);
  ~KnowledgeBases() { Stop(); }

  // Fills in what a prompt names of knowledge bases: texts of documents, keys, and in `versions` what was read. Each
  // knowledge base is looked up once, so that all of a request comes from one version of it. No-op for prompts that
  // name none. Then calls `done` once: before it returns, unless the store must be asked, the first time that a
  // knowledge base is named, or after a while; then on a thread of its own. Never blocks. `prompt` and `versions` live
  // until then. ResourceExhausted: too many prompts of the caller wait for the store, or it is stopping.
  void Resolve(const Caller& caller, Prompt* prompt, std::map<std::string, uint64_t>* versions,
               std::function<void(const absl::Status&)> done);

  // See KbPublisher. Cancelled by Stop.
  absl::StatusOr<KbVersion> Publish(const Caller& caller, const PublishInput& input, PublishControl& control);
  absl::StatusOr<std::vector<KbHead>> List(const Caller& caller) const;
  // `version` 0: the current one, else the latest ready one, if any.
  absl::StatusOr<KbView> Get(const Caller& caller, const std::string& name, uint64_t version) const;
  struct DiffResult {
    uint64_t from = 0, to = 0;
    KbDiff diff;
  };
  // 0: the one that was current before, and the current one.
  absl::StatusOr<DiffResult> Diff(const Caller& caller, const std::string& name, uint64_t from, uint64_t to) const;
  // The head afterwards. FailedPrecondition ("version_not_ready", "no_previous_version").
  absl::StatusOr<KbHead> Swap(const Caller& caller, const std::string& name, uint64_t version);
  absl::StatusOr<KbHead> Rollback(const Caller& caller, const std::string& name);
  struct Deleted {
    uint64_t versions = 0;
    uint64_t chunks = 0;
    uint64_t bytes = 0;
  };
  // `version` 0: all of it. The version stops being served before its chunks go; a deletion that was cut short leaves
  // failed versions behind, and may be repeated. FailedPrecondition ("version_in_use"): it is current. Aborted
  // ("publish_in_progress").
  absl::StatusOr<Deleted> Delete(const Caller& caller, const std::string& name, uint64_t version);

  absl::StatusOr<std::vector<CallerNamespace>> ListNamespaces(const Caller& caller) const;
  // AlreadyExists. FailedPrecondition: a public one, where callers have no key in common.
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
  std::unique_ptr<KbStore> store_;  // null without --store; then so are the next three
  std::unique_ptr<KbPublisher> publisher_;
  std::unique_ptr<KbCache> cache_;
  std::unique_ptr<KbLookups> lookups_;

  std::mutex mutex_;  // guards all below
  std::condition_variable ended_;
  std::set<PublishControl*> running_;
  bool stopping_ = false;
};

}  // namespace spl::router
