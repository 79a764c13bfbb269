#include "services/base/thread_priority.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace spl {

void SetThreadPriority(ThreadPriority priority) {
  // On Linux a nice value belongs to a thread; raising it needs no right.
  const auto thread = static_cast<id_t>(::syscall(SYS_gettid));
  (void)::setpriority(PRIO_PROCESS, thread, static_cast<int>(priority));
}

}  // namespace spl
