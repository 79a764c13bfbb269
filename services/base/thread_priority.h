// Priorities of background work, so that it yields to work that a client waits for.
#pragma once

namespace spl {

enum class ThreadPriority : int {
  kTransfer = 5,     // moves KV of requests whose first token is out: before bookkeeping, after compute and answers
  kBackground = 15,  // no client waits for it: publishing to the store
};

// Sets the priority of the calling thread. Best effort: does nothing if the system refuses.
void SetThreadPriority(ThreadPriority priority);

}  // namespace spl
