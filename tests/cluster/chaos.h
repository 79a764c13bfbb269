// A whole cluster of real processes, things that go wrong in it, and clients that check every answer.
//
// Every choice (which fault, where, when, which prompt) comes from one seed; when things happen exactly is the
// machine's doing, so that a seed repeats a plan and not a run.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/cluster/processes.h"
#include "tests/support/certificates.h"
#include "tests/support/etcd_process.h"
#include "tests/support/temp_dir.h"

namespace spl::test {

struct ChaosOptions {
  std::chrono::seconds duration{40};
  uint64_t min_requests = 0;  // goes on beyond the duration until there are as many
  uint64_t seed = 1;
  int num_prefill = 4, num_decode = 4, num_stores = 2, num_routers = 2;
  int num_clients = 6;
  bool only_routers = false;                        // nothing but routers is killed
  std::chrono::milliseconds between_faults{2'500};  // on average
  std::chrono::milliseconds deadline{12'000};       // of a request
  int max_tokens = 16;
  // Writes are delayed and programs stopped for up to three times as long.
  std::chrono::milliseconds ticket_ttl{5'000};
  bool tls = false;  // between the programs
};

struct ChaosReport {
  uint64_t seed = 0;
  double seconds = 0;
  uint64_t requests = 0, exact = 0;
  uint64_t wrong = 0;        // another text than the plain model's
  uint64_t ended = 0;        // whole answers of methods that approximate: their texts are not compared
  uint64_t hangs = 0;        // no end within the deadline and 2 s
  uint64_t untyped = 0;      // an error without a type, or a connection that broke although its router lived
  uint64_t crashes = 0;      // programs that ended and were not meant to
  uint64_t router_lost = 0;  // their router was killed; the client asked another one
  uint64_t migrated = 0;     // moved to another decode worker midway
  uint64_t retried = 0;      // more than one attempt before the first token
  std::map<std::string, uint64_t> kinds;         // whole answers by kind of request
  std::map<std::string, uint64_t> refused;       // by "STATUS type code"
  std::map<std::string, uint64_t> faults;        // by kind
  std::vector<double> silence_s;                 // of lost workers, from their last sign of life to their loss
  double leaked_pages = -1;                      // on decode workers, at the end; -1: could not be read
  double unfinished = -1;                        // requests that programs still count
  uint64_t exact_after = 0, requests_after = 0;  // when nothing fails any more
  std::vector<std::string> samples;              // of what was wrong, a few

  double SilenceQuantile(double q) const;
  nlohmann::ordered_json ToJson() const;
};

// Runs it all; prints a line every ten seconds. Failures to start anything are gtest failures.
ChaosReport RunChaos(const ChaosOptions& options);

}  // namespace spl::test
