// The limit of open files. Every connection is an open file, and shells start programs with a limit of 1,024.
#pragma once

namespace spl {

// Raises this process's limit to the highest that the system allows (`ulimit -Hn`); does nothing if that fails. Call it
// at the start of main. Child programs inherit the limit.
void RaiseOpenFileLimit();

}  // namespace spl
