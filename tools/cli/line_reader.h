// Reads what a person types, line by line: with editing and history on a terminal, plainly everywhere else.
#pragma once

#include <memory>
#include <string>

#include "tools/cli/interrupt_event.h"
#include "tools/cli/terminal.h"

namespace spl::cli {

// One thread.
class LineReader {
 public:
  enum class End { kLine, kInterrupted, kInput };
  virtual ~LineReader() = default;
  // Waits for a line and stores it without its line end; a pasted text may have line ends inside. kInterrupted: Ctrl-C,
  // and what was typed is gone. kInput: the input has ended, or Ctrl-D was typed.
  virtual End Read(const std::string& prompt, std::string& line) = 0;
  // Makes `text` the newest line that the arrow keys bring back.
  virtual void AddToHistory(const std::string& text) = 0;
};

// From standard input; shows prompts on standard output where `prompts` is set. Has no history. Borrows `interrupt`.
std::unique_ptr<LineReader> MakePlainReader(InterruptEvent& interrupt, bool prompts);

// From the terminal that standard input and output are: arrow keys, history and its search (Ctrl-R), Alt-Enter for a
// line end, pasted text in one piece, and the bindings of ~/.editrc. Null: this build has no libedit, or it cannot use
// the terminal. Borrows `interrupt`.
std::unique_ptr<LineReader> MakeTerminalReader(InterruptEvent& interrupt, Style style);

}  // namespace spl::cli
