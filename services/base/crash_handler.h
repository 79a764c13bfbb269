// Prints the thread's stack to stderr when the program dies of a signal (SIGSEGV, SIGABRT, ...).
#pragma once

namespace spl {

// Call once at the start of main, with its argv[0]. Removes the handlers that UCX installs when it is loaded. Builds
// with a sanitizer keep the sanitizer's own handlers.
void InstallCrashHandler(const char* program);

}  // namespace spl
