// Compiled grammars by their content, made on threads of their own: no other request waits for a compile.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/grammar/token_grammar.h"

namespace spl::grammar {

struct GrammarCacheOptions {
  size_t max_entries = 512;
  size_t max_bytes = 256 << 20;  // taken by compiled grammars; one that is larger by itself is used and not kept
  int num_threads = 2;           // compiles at one time, at background priority
  int running_of_tenant = 1;     // those for one tenant
  size_t waiting_of_tenant = 8;  // grammars that wait for a thread
  std::chrono::milliseconds deadline{20'000};  // from the request until its grammar is there
};

// Makes the compiler when the first grammar is asked for: the vocabulary is read and sorted then.
using MakeCompiler = std::function<absl::StatusOr<std::unique_ptr<GrammarCompiler>>()>;
using CompiledGrammar = absl::StatusOr<std::shared_ptr<const TokenGrammar>>;

// Any thread. Owns its threads, which start with the first compile.
//
// A compile whose waiters are past the deadline runs on, and its result, or its error, is kept for whoever asks again.
// It ends by itself: after 10 s of processor time it is refused (GrammarCompiler), so that threads come free again.
class GrammarCache {
 public:
  explicit GrammarCache(MakeCompiler make, const GrammarCacheOptions& options = {});
  ~GrammarCache();  // Stop()

  // Calls `done` once: at once, on this thread, if the grammar is there or is refused, else on a thread of the cache;
  // it must not block. InvalidArgument: the compiler's reason, or a text beyond the limits. ResourceExhausted: too many
  // of the tenant's wait. DeadlineExceeded. Unavailable: stopped. Errors of MakeCompiler.
  void Get(const GrammarSpec& spec, const std::string& tenant, std::function<void(CompiledGrammar)> done);

  size_t num_entries() const;
  size_t num_bytes() const;
  uint64_t num_compiles() const;

  // Ends who waits with Unavailable, and waits for compiles that run. Idempotent; not from a `done`.
  void Stop();

 private:
  struct Waiter {
    std::function<void(CompiledGrammar)> done;
    std::chrono::steady_clock::time_point deadline;
  };
  struct Job {
    GrammarSpec spec;
    std::string tenant;
    std::vector<Waiter> waiters;
    bool running = false;
  };
  struct Entry {
    std::string key;
    CompiledGrammar grammar;
    size_t bytes = 0;
  };

  void StartThreadsLocked();
  void CompileLoop();
  void WatchLoop();  // ends waiters whose deadline has passed
  CompiledGrammar Compile(const GrammarSpec& spec);
  std::list<Job>::iterator NextLocked();
  void KeepLocked(std::string key, const CompiledGrammar& grammar);
  absl::Status CheckTenantLocked(const std::string& tenant) const;

  const MakeCompiler make_;
  const GrammarCacheOptions options_;
  std::mutex compiler_mutex_;  // guards compiler_
  std::unique_ptr<GrammarCompiler> compiler_;

  mutable std::mutex mutex_;  // guards all below
  std::condition_variable work_, watch_;
  std::list<Job> jobs_;       // in the order in which they came
  std::list<Entry> entries_;  // most recently used first
  std::map<std::string, std::list<Entry>::iterator> by_key_;
  size_t bytes_ = 0;
  uint64_t num_compiles_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace spl::grammar
