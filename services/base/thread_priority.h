// Background work that may wait for what a client waits for.
#pragma once

namespace spl {

enum class ThreadPriority : int {
  kTransfer = 5,     // moves KV of requests whose first token is out: before bookkeeping, behind compute and answers
  kBackground = 15,  // nobody waits for it: publishing to the store
};

// Sets the calling thread's. Best effort: a system that refuses leaves it as it is.
void SetThreadPriority(ThreadPriority priority);

}  // namespace spl
