// Publishes a version of a knowledge base: tokenizes, packs, computes on the prefill workers, makes it current.
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
  // True: the documents are always asked together, in this order. Each is computed after those before it, as many as
  // fit in a context. False: each is computed alone after the instruction. (Copies that have seen other documents than
  // those they are asked with answer badly: docs/results/2026-11-23-knowledge-base-contexts.md.)
  bool together = false;
};

struct PublishProgress {
  uint64_t contexts_done = 0;
  uint64_t contexts = 0;
  uint64_t tokens_done = 0;  // in complete contexts, instructions included
  uint64_t tokens = 0;
};

// The caller's handle on one publish. Any thread may call.
class PublishControl {
 public:
  // `on_progress` runs on the publishing thread, also before the first context.
  explicit PublishControl(std::function<void(const PublishProgress&)> on_progress)
      : on_progress_(std::move(on_progress)) {}
  // Ends the publish with `reason` as soon as its worker has stopped; does nothing if it has already ended.
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
  uint64_t context_tokens = 0;        // tokens of a canonical context; 0: as many as model and workers allow
  uint64_t quota_bytes = 0;           // KV bytes of one version on one store; 0: no limit
  size_t max_knowledge_bases = 1000;  // per caller
  std::chrono::milliseconds heartbeat{5'000};
  // A version whose publisher has given no sign of life for this long has failed. The wall clocks of routers that share
  // a store must differ by less than this.
  std::chrono::milliseconds publisher_timeout{30'000};
  std::chrono::milliseconds context_timeout{1'800'000};  // for one context on one worker
  size_t contexts_per_worker = 6;                // at a time, so that some are stored while the next is computed
  int max_attempts = 3;                          // per context, on workers that are or become unavailable
  std::chrono::milliseconds retry_backoff{500};  // times the attempt's number
};

// Thread-safe: several publishes of different knowledge bases may run. Borrows all arguments.
//
// A version is listed as publishing before anything is stored for it. It becomes ready, and current, in one change of
// the head after everything is stored. A failure in between therefore leaves the current version untouched, and the
// stored data can be found and dropped by the publisher itself or by the next publish.
class KbPublisher {
 public:
  KbPublisher(const KbStore& store, const ServedModel& model, const Fleet& fleet, const NamespaceKeys& keys,
              const KbPublisherOptions& options)
      : store_(store), model_(model), fleet_(fleet), keys_(keys), options_(options) {}

  // Blocks until the version is ready or has failed. InvalidArgument names the field: no documents, too many or too
  // large ones, a duplicate id, a text that is longer than a context. Aborted ("publish_in_progress"): another
  // publisher is at work on this knowledge base, or took this version for failed. Unavailable: no worker, or no store.
  // ResourceExhausted: the stores are full, or a limit of the caller is reached.
  absl::StatusOr<KbVersion> Publish(const Caller& caller, const PublishInput& input, PublishControl& control) const;

  // Marks publishing versions whose publisher is gone as failed, for lists.
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

// Checks limits and names. InvalidArgument names the field.
absl::Status CheckPublishInput(const PublishInput& input);

}  // namespace spl::router
