// Publishing a version of a knowledge base: tokenize, pack, compute on the prefill workers, make current.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "services/router/admission/auth.h"
#include "services/router/fleet/fleet.h"
#include "services/router/kb/kb_store.h"
#include "services/router/request/served_model.h"

namespace spl::router {

struct PublishInput {
  struct Document {
    std::string id;
    std::string text;
  };
  std::string name;
  std::string instruction;
  std::vector<Document> documents;
  bool swap = true;     // make it current
  bool durable = true;  // on the stores' disks before it is ready
  // Documents that are always asked together, in this order: each is computed behind those before it, as many as fit in
  // a context. Otherwise each by itself behind the instruction: copies that have seen other documents than those they
  // are asked with answer badly (docs/results/2026-11-23-knowledge-base-contexts.md).
  bool together = false;
};

struct PublishProgress {
  uint64_t contexts_done = 0;
  uint64_t contexts = 0;
  uint64_t tokens_done = 0;  // of whole contexts, instructions included
  uint64_t tokens = 0;
};

// The caller's side of one publish. Any thread.
class PublishControl {
 public:
  // `on_progress` runs on the publishing thread, also before the first context.
  explicit PublishControl(std::function<void(const PublishProgress&)> on_progress)
      : on_progress_(std::move(on_progress)) {}
  // The publish ends with `reason` as soon as its worker has let go; nothing happens when it has ended.
  void Cancel(absl::Status reason);

 private:
  friend class KbPublisher;
  absl::Status cancelled() const;

  const std::function<void(const PublishProgress&)> on_progress_;
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  absl::Status reason_;
};

struct KbPublisherOptions {
  uint64_t context_tokens = 0;        // of a canonical context; 0: as many as model and workers take
  uint64_t quota_bytes = 0;           // of KV of one version on one store; 0: none
  size_t max_knowledge_bases = 1000;  // of one caller
  std::chrono::milliseconds heartbeat{5'000};
  // A version whose publisher has not been heard of for this long has failed. Wall clocks of routers that share a store
  // may differ by less than this.
  std::chrono::milliseconds publisher_timeout{30'000};
  std::chrono::milliseconds context_timeout{1'800'000};  // for one context on one worker
  size_t contexts_per_worker = 6;                        // at a time: some are stored while the next one is computed
  int max_attempts = 3;                                  // for one context, on workers that are or become unavailable
  std::chrono::milliseconds retry_backoff{500};          // times the attempt's number
};

// Thread-safe: several publishes may run, of different knowledge bases. Borrows everything.
//
// A version is listed as publishing before anything is stored for it, and becomes ready, and current, in one change of
// the head after all is stored. So whatever happens in between leaves the version that is current untouched, and what
// was stored can be found and dropped: by the publisher itself, or by the next publish.
class KbPublisher {
 public:
  KbPublisher(const KbStore& store, const ServedModel& model, const Fleet& fleet, const NamespaceKeys& keys,
              const KbPublisherOptions& options)
      : store_(store), model_(model), fleet_(fleet), keys_(keys), options_(options) {}

  // Blocks until the version is ready or has failed. InvalidArgument names the field: no documents, too many or too
  // large ones, an id twice, a text that is longer than a context. Aborted ("publish_in_progress"): somebody else
  // publishes this knowledge base, or took this version for failed. Unavailable: no worker, or no store.
  // ResourceExhausted: the stores are full, or a limit of the caller's.
  absl::StatusOr<KbVersion> Publish(const Caller& caller, const PublishInput& input, PublishControl& control) const;

  // A publishing version whose publisher is gone counts as failed. For lists.
  void MarkAbandoned(KbHead& head) const;

 private:
  struct Prepared;
  struct Result;
  class ContextRun;

  absl::StatusOr<Prepared> Prepare(const PublishInput& input, const FleetSnapshot& fleet) const;
  absl::StatusOr<KbVersion> Claim(const chunk::Digest& owner, const PublishInput& input,
                                  const Prepared& prepared) const;
  absl::Status Collect(const Caller& caller, const std::string& name) const;
  absl::StatusOr<Result> Compute(const Caller& caller, const PublishInput& input, const Prepared& prepared,
                                 const KbVersion& version, PublishControl& control) const;
  absl::StatusOr<KbVersion> Finish(const chunk::Digest& owner, const PublishInput& input, const KbVersion& version,
                                   const Result& result) const;
  void Fail(const Caller& caller, const std::string& name, const KbVersion& version, const absl::Status& status) const;
  absl::Status Beat(const chunk::Digest& owner, const std::string& name, const KbVersion& version) const;

  const KbStore& store_;
  const ServedModel& model_;
  const Fleet& fleet_;
  const NamespaceKeys& keys_;
  const KbPublisherOptions options_;
};

// Limits and names; InvalidArgument names the field.
absl::Status CheckPublishInput(const PublishInput& input);

}  // namespace spl::router
