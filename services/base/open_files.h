// The limit of open files: every connection is one, and shells start programs with 1,024.
#pragma once

namespace spl {

// Raises this process's limit to the highest that the system allows it (`ulimit -Hn`). Nothing happens where that
// fails. Call at the start of main; programs that are started from here inherit it.
void RaiseOpenFileLimit();

}  // namespace spl
