// Prints the thread's stack to stderr when the program dies of a signal (SIGSEGV, SIGABRT, ...).
#pragma once

namespace spl {

// Call once at the start of main, with its argv[0]. Does nothing in builds with a sanitizer, which has its own.
void InstallCrashHandler(const char* program);

}  // namespace spl
