#include "services/base/crash_handler.h"

#include "absl/debugging/failure_signal_handler.h"
#include "absl/debugging/symbolize.h"

namespace spl {

void InstallCrashHandler([[maybe_unused]] const char* program) {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  absl::InitializeSymbolizer(program);
  absl::FailureSignalHandlerOptions options;
  options.call_previous_handler = true;  // the core dump, or the handler that was installed before
  absl::InstallFailureSignalHandler(options);
#endif
}

}  // namespace spl
