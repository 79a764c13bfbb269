// Recorded answers and the message that each should become, however it is cut.
#pragma once

#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "services/router/output_formats/registry.h"

namespace spl::router {

// "NAME(ARGUMENTS)" of each call, in order.
struct Message {
  std::string reasoning, content;
  std::vector<std::string> calls;
  bool operator==(const Message&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Message& m);

struct Case {
  const char* what;
  std::string text;
  Message expected;
  bool in_reasoning = false;
};

// The tools of a request: edit with path, note and line, and bare.
extern const char kCaseTools[];

// The delta of each piece of an answer, and the one of its end.
std::vector<OutputDelta> DeltasOf(const OutputFormat& format, const std::vector<std::string_view>& pieces,
                                  bool in_reasoning);

// The message that the deltas of the pieces make. Fails the test if a call's first delta has not its own index and id,
// or another one has a name or an id.
Message ParsePieces(const OutputFormat& format, const std::vector<std::string_view>& pieces, bool in_reasoning);

std::vector<std::string_view> BytesOf(std::string_view text);

// Fails the test unless each answer becomes its message: as a whole, byte by byte, cut at every place, and in random
// pieces. Prints the seed.
void ExpectCases(const OutputFormat& format, const std::vector<Case>& cases);

}  // namespace spl::router
