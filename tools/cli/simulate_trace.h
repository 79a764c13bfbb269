// Requests of a simulation: read from a trace of `splice bench --trace`, or generated.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace spl::cli {

struct SimSegment {
  uint32_t begin = 0, end = 0;  // tokens [begin, end) of the prompt
  uint64_t id = 0;              // id of its text
};

struct SimRequest {
  double at_s = 0;
  uint32_t input_tokens = 0;
  uint32_t output_tokens = 0;
  // One for each 512 tokens of the prompt; the last may stand for fewer. Two prompts with an equal id have equal tokens
  // up to the end of its block.
  std::vector<uint64_t> hash_ids;
  std::vector<SimSegment> segments;  // ascending, disjoint
  std::string tenant;
  int32_t priority = 0;
};

// Reads the JSONL of ReadTracePlan, without "prompt" and "messages" (a simulation has no tokenizer), and optionally
//   "segments": [[BEGIN, END, ID], …], "tenant": NAME, "priority": N
// Returns the requests in the order of their times. rate_per_s > 0: times are scaled to that mean rate. InvalidArgument
// names file and line.
absl::StatusOr<std::vector<SimRequest>> ReadSimTrace(const std::string& path, double rate_per_s, uint32_t max_requests);
// One line per request, in the form of ReadSimTrace.
std::string TraceText(const std::vector<SimRequest>& requests);

struct SimTraceOptions {
  uint32_t num_requests = 20'000;
  double rate_per_s = 40;
  uint64_t seed = 1;
};

// Generates requests with Poisson arrivals. Equal options give equal requests on every machine. Kinds:
//
// "rag": 1,024 tokens of instructions, 4 of 1,000 documents (Zipf, s = 0.9) of 1,024 tokens each, in any order, a
// question of 128; every document is a segment. 128 tokens of output.
// "chat": 4 assistants with instructions of 2,048 tokens; conversations of 1 to 12 turns, 128 to 640 tokens of question
// and 128 to 512 of answer each, a pause of 20 s in the mean between them.
// "hot": one text of 8,192 tokens in front of every question of 256. 64 tokens of output.
// "day": the requests of "chat", their rate following a day's sine between 0.25 and 1.75 of the mean.
absl::StatusOr<std::vector<SimRequest>> MakeSimTrace(const std::string& kind, const SimTraceOptions& options);

}  // namespace spl::cli
