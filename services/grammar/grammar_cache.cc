#include "services/grammar/grammar_cache.h"

#include <algorithm>
#include <utility>

#include "services/base/status.h"
#include "services/base/thread_priority.h"
#include "services/grammar/grammar_limits.h"

namespace spl::grammar {
namespace {

using Clock = std::chrono::steady_clock;

std::string KeyOf(const GrammarSpec& spec) {
  return std::string{static_cast<char>('0' + static_cast<int>(spec.kind)), spec.strict ? 's' : '-'} + spec.text;
}

// The same text would be refused again; other errors may be gone the next time.
bool IsKept(const CompiledGrammar& grammar) { return grammar.ok() || absl::IsInvalidArgument(grammar.status()); }

}  // namespace

GrammarCache::GrammarCache(MakeCompiler make, const GrammarCacheOptions& options)
    : make_(std::move(make)), options_(options) {}

GrammarCache::~GrammarCache() { Stop(); }

void GrammarCache::Get(const GrammarSpec& spec, const std::string& tenant, std::function<void(CompiledGrammar)> done) {
  if (const absl::Status bounded = CheckGrammarSpec(spec); !bounded.ok()) return done(bounded);
  std::string key = KeyOf(spec);
  std::unique_lock lock(mutex_);
  if (const auto found = by_key_.find(key); found != by_key_.end()) {
    entries_.splice(entries_.begin(), entries_, found->second);
    const CompiledGrammar grammar = found->second->grammar;
    lock.unlock();
    return done(grammar);
  }
  absl::Status refused;
  if (stopping_) refused = absl::UnavailableError("the process is stopping");
  Waiter waiter{std::move(done), Clock::now() + options_.deadline};
  auto job = std::find_if(jobs_.begin(), jobs_.end(), [&](const Job& other) { return other.spec == spec; });
  if (refused.ok() && job == jobs_.end()) refused = CheckTenantLocked(tenant);
  if (!refused.ok()) {
    lock.unlock();
    return waiter.done(refused);
  }
  if (job == jobs_.end()) job = jobs_.insert(jobs_.end(), {.spec = spec, .tenant = tenant, .waiters = {}});
  job->waiters.push_back(std::move(waiter));
  StartThreadsLocked();
  work_.notify_one();
  watch_.notify_one();
}

absl::Status GrammarCache::CheckTenantLocked(const std::string& tenant) const {
  const auto waiting = static_cast<size_t>(
      std::count_if(jobs_.begin(), jobs_.end(), [&](const Job& job) { return job.tenant == tenant && !job.running; }));
  if (waiting < options_.waiting_of_tenant) return absl::OkStatus();
  return Errorf(absl::StatusCode::kResourceExhausted,
                "{} grammars of this caller wait to be compiled, try again in a moment", waiting);
}

void GrammarCache::StartThreadsLocked() {
  if (!threads_.empty()) return;
  for (int i = 0; i < options_.num_threads; ++i) threads_.emplace_back([this] { CompileLoop(); });
  threads_.emplace_back([this] { WatchLoop(); });
}

// The oldest whose tenant has a thread left.
std::list<GrammarCache::Job>::iterator GrammarCache::NextLocked() {
  return std::find_if(jobs_.begin(), jobs_.end(), [&](const Job& job) {
    const auto running =
        std::count_if(jobs_.begin(), jobs_.end(), [&](const Job& o) { return o.running && o.tenant == job.tenant; });
    return !job.running && running < options_.running_of_tenant;
  });
}

void GrammarCache::CompileLoop() {
  SetThreadPriority(ThreadPriority::kBackground);
  std::unique_lock lock(mutex_);
  while (true) {
    auto job = jobs_.end();
    work_.wait(lock, [&] { return stopping_ || (job = NextLocked()) != jobs_.end(); });
    if (stopping_) return;
    job->running = true;
    ++num_compiles_;
    lock.unlock();
    CompiledGrammar grammar = Compile(job->spec);  // nobody else touches the spec of a job
    lock.lock();
    std::vector<Waiter> waiters = std::move(job->waiters);
    if (IsKept(grammar)) KeepLocked(KeyOf(job->spec), grammar);
    jobs_.erase(job);
    work_.notify_all();  // the tenant has a thread again
    lock.unlock();
    for (const Waiter& waiter : waiters) waiter.done(grammar);
    lock.lock();
  }
}

CompiledGrammar GrammarCache::Compile(const GrammarSpec& spec) {
  const GrammarCompiler* compiler = nullptr;
  {
    std::lock_guard lock(compiler_mutex_);
    if (compiler_ == nullptr) {
      SPLICE_ASSIGN_OR_RETURN(compiler_, make_());
    }
    compiler = compiler_.get();
  }
  return compiler->Compile(spec);
}

void GrammarCache::KeepLocked(std::string key, const CompiledGrammar& grammar) {
  const size_t bytes = key.size() * 2 + (grammar.ok() ? (*grammar)->num_bytes() : 0);
  if (bytes > options_.max_bytes) return;
  entries_.push_front({key, grammar, bytes});
  by_key_.emplace(std::move(key), entries_.begin());
  bytes_ += bytes;
  while (bytes_ > options_.max_bytes || entries_.size() > options_.max_entries) {
    bytes_ -= entries_.back().bytes;
    by_key_.erase(entries_.back().key);
    entries_.pop_back();
  }
}

void GrammarCache::WatchLoop() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    auto next = Clock::time_point::max();
    std::vector<Waiter> late;
    const auto now = Clock::now();
    for (Job& job : jobs_) {
      for (auto waiter = job.waiters.begin(); waiter != job.waiters.end();) {
        if (waiter->deadline > now) {
          next = std::min(next, waiter->deadline);
          ++waiter;
          continue;
        }
        late.push_back(std::move(*waiter));
        waiter = job.waiters.erase(waiter);
      }
    }
    if (!late.empty()) {
      // Those whom nobody waits for any more are not begun.
      jobs_.remove_if([](const Job& job) { return job.waiters.empty() && !job.running; });
      lock.unlock();
      for (const Waiter& waiter : late)
        waiter.done(Errorf(absl::StatusCode::kDeadlineExceeded, "the grammar was not compiled within {} ms",
                           options_.deadline.count()));
      lock.lock();
      continue;
    }
    if (next == Clock::time_point::max())
      watch_.wait(lock);
    else
      watch_.wait_until(lock, next);
  }
}

size_t GrammarCache::num_entries() const {
  std::lock_guard lock(mutex_);
  return entries_.size();
}

size_t GrammarCache::num_bytes() const {
  std::lock_guard lock(mutex_);
  return bytes_;
}

uint64_t GrammarCache::num_compiles() const {
  std::lock_guard lock(mutex_);
  return num_compiles_;
}

void GrammarCache::Stop() {
  std::vector<Waiter> waiters;
  std::vector<std::thread> threads;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    for (Job& job : jobs_) {
      std::move(job.waiters.begin(), job.waiters.end(), std::back_inserter(waiters));
      job.waiters.clear();
    }
    jobs_.remove_if([](const Job& job) { return !job.running; });
    threads = std::exchange(threads_, {});
    work_.notify_all();
    watch_.notify_all();
  }
  for (const Waiter& waiter : waiters) waiter.done(absl::UnavailableError("the process is stopping"));
  for (std::thread& thread : threads) thread.join();
}

}  // namespace spl::grammar
