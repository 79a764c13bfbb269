// Knowledge bases in the chunk stores: heads and contents as records, and the namespaces of the versions.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/chunk/remote/namespace_client.h"
#include "services/chunk/remote/record_client.h"
#include "services/router/kb/kb_manifest.h"

namespace spl::router {

// Blocking calls, each limited by `timeout`; any thread may call. NotFound has the code "knowledge_base_not_found" and
// the caller's name for it. Unavailable names the store.
class KbStore {
 public:
  KbStore(std::unique_ptr<chunk::RecordClient> records, std::unique_ptr<chunk::NamespaceClient> namespaces,
          std::chrono::milliseconds timeout)
      : records_(std::move(records)), namespaces_(std::move(namespaces)), timeout_(timeout) {}

  struct Loaded {
    KbHead head;
    uint64_t revision = 0;
  };
  absl::StatusOr<Loaded> Load(const chunk::Digest& owner, const std::string& name) const;
  // Returns heads by name. A damaged one is left out and logged.
  absl::StatusOr<std::vector<KbHead>> List(const chunk::Digest& owner) const;
  absl::StatusOr<size_t> Count(const chunk::Digest& owner) const;

  // Reads the head, applies `change` to it, and writes it back; starts again if another writer was faster. `create`: a
  // missing head starts as a new one. Returns errors of `change` unchanged. Aborted: another writer was faster every
  // time.
  using ChangeFn = std::function<absl::Status(KbHead& head)>;
  absl::StatusOr<KbHead> Change(const chunk::Digest& owner, const std::string& name, bool create,
                                const ChangeFn& change) const;
  absl::Status DeleteHead(const chunk::Digest& owner, const std::string& name, uint64_t revision) const;

  // DataLoss: the stored content belongs to another version.
  absl::StatusOr<std::shared_ptr<const KbContent>> LoadContent(const chunk::Digest& owner, const std::string& name,
                                                               const KbVersion& version) const;
  absl::Status SaveContent(const chunk::Digest& owner, const std::string& name, uint64_t version, bool durable,
                           const KbContent& content) const;

  // Creates the namespace of a version on all stores; it may already exist.
  absl::Status CreateNamespace(const chunk::Digest& id, const chunk::NamespaceSettings& settings) const;
  // Drops a version's chunks and content. Missing ones are not an error.
  absl::StatusOr<chunk::NamespaceClient::Deleted> DropVersion(const chunk::Digest& owner, const std::string& name,
                                                              uint64_t version,
                                                              const chunk::Digest& namespace_id) const;

  chunk::NamespaceClient& namespaces() const { return *namespaces_; }
  std::chrono::steady_clock::time_point Deadline() const { return std::chrono::steady_clock::now() + timeout_; }

 private:
  absl::Status Write(const chunk::Digest& owner, KbHead& head, uint64_t revision) const;

  const std::unique_ptr<chunk::RecordClient> records_;
  const std::unique_ptr<chunk::NamespaceClient> namespaces_;
  const std::chrono::milliseconds timeout_;
};

// NotFound, with the code that clients look for.
absl::Status NoKnowledgeBase(const std::string& name);
absl::Status NoVersion(const std::string& name, uint64_t version);

}  // namespace spl::router
