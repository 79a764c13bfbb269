#include "services/base/crash_handler.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <ucontext.h>

#include <algorithm>

#include "absl/debugging/failure_signal_handler.h"
#include "absl/debugging/stacktrace.h"
#include "absl/debugging/symbolize.h"

namespace spl {
namespace {

// UCX installs handlers of its own when it is loaded. They are removed before ours are there: UCX puts back what was
// there before its own, whatever has been installed since. Programs without UCX have no such function.
void TakeSignalsFromUcx() {
  using Disable = void (*)();
  if (const auto disable = reinterpret_cast<Disable>(dlsym(RTLD_DEFAULT, "ucs_debug_disable_signals"))) disable();
}

// Where the signal came in.
void* InterruptedAt([[maybe_unused]] const void* context) {
#if defined(__x86_64__)
  if (context != nullptr)
    return reinterpret_cast<void*>(static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
  if (context != nullptr) return reinterpret_cast<void*>(static_cast<const ucontext_t*>(context)->uc_mcontext.pc);
#endif
  return nullptr;
}

// Abseil's own unwinder follows frame pointers, which optimized code has not. This one reads the unwind tables. A
// sanitizer has handlers of its own.
[[maybe_unused]] int Unwind(void** frames, int* sizes, int max_depth, int skip_count, const void* context,
                            int* min_dropped_frames) {
  constexpr int kMost = 64;
  void* all[kMost];
  void** const end = all + backtrace(all, kMost);
  void** begin = std::find(all, end, InterruptedAt(context));
  if (begin == end) begin = std::min(all + skip_count + 1, end);  // + 1: this function
  const int count = static_cast<int>(std::min<std::ptrdiff_t>(end - begin, max_depth));
  std::copy_n(begin, count, frames);
  if (sizes != nullptr) std::fill_n(sizes, count, 0);
  if (min_dropped_frames != nullptr) *min_dropped_frames = static_cast<int>(end - begin) - count;
  return count;
}

}  // namespace

void InstallCrashHandler([[maybe_unused]] const char* program) {
  TakeSignalsFromUcx();
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  absl::InitializeSymbolizer(program);
  void* frame = nullptr;
  backtrace(&frame, 1);  // the first call loads a library, which a signal handler may not
  absl::SetStackUnwinder(Unwind);
  absl::FailureSignalHandlerOptions options;
  options.call_previous_handler = true;  // the core dump, or the handler that was installed before
  absl::InstallFailureSignalHandler(options);
#endif
}

}  // namespace spl
