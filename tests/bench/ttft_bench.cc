// What the cluster adds to the time to the first token: the same prompts through the plain in-process model and through
// router, prefill and decode of one process, in turn, so that both see the same machine.
//
//   build/bench/splice_ttft_bench [prompt tokens] [rounds]
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <vector>

#include "services/base/log.h"
#include "services/base/status.h"
#include "tests/bench/median.h"
#include "tools/cli/local_cluster.h"
#include "tools/cli/text_generator.h"

namespace spl {
namespace {

absl::Status Run(int prompt_tokens, int rounds) {
  SPLICE_ASSIGN_OR_RETURN(auto cluster, cli::LocalCluster::Start({.model = {.dir = "models/splice-tiny"},
                                                                  .http_listen = "127.0.0.1:0",
                                                                  .grpc_listen = "127.0.0.1:0"}));
  SPLICE_ASSIGN_OR_RETURN(auto local, cli::MakeLocalTextGenerator({.model = {.dir = "models/splice-tiny"}}));
  SPLICE_ASSIGN_OR_RETURN(auto remote, cli::MakeEndpointGenerator({.url = cluster->http_address()}));
  std::mt19937 random(1);
  std::vector<double> local_ms, remote_ms, difference_ms, around_ms;
  double engine_ms = 0;  // of the last run through the cluster: what its own prefill engine took
  const auto measure = [&](cli::TextGenerator& generator, const std::vector<int32_t>& ids) -> absl::StatusOr<double> {
    SPLICE_ASSIGN_OR_RETURN(const auto result, generator.Generate({.ids = ids, .max_tokens = 2, .ignore_eos = true},
                                                                  [](const std::string&) { return true; }));
    if (result.receipt.is_object()) engine_ms = result.receipt.value("/seconds/prefill"_json_pointer, 0.0) * 1e3;
    return result.ttft_s * 1e3;
  };
  for (int round = -1; round < rounds; ++round) {  // the first one warms up
    std::vector<int32_t> ids(prompt_tokens);
    for (int32_t& id : ids) id = 33 + static_cast<int32_t>(random() % 90);  // printable: the first token has a text
    SPLICE_ASSIGN_OR_RETURN(const double in_process, measure(*local, ids));
    SPLICE_ASSIGN_OR_RETURN(const double through, measure(*remote, ids));
    // While this one runs, the cluster finishes what it does after an answer (commit, publishing to the store);
    // measured it would burden the next round's first run.
    SPLICE_RETURN_IF_ERROR(measure(*local, ids).status());
    if (round < 0) continue;
    fmt::print("round {}: in process {:.1f} ms, cluster {:.1f} ms, difference {:+.1f} ms\n", round, in_process, through,
               through - in_process);
    local_ms.push_back(in_process);
    remote_ms.push_back(through);
    difference_ms.push_back(through - in_process);
    around_ms.push_back(through - engine_ms);
  }
  fmt::print("{} tokens, median of {}: in process {:.1f} ms, cluster {:.1f} ms, difference {:+.1f} ms\n", prompt_tokens,
             rounds, Median(local_ms), Median(remote_ms), Median(difference_ms));
  fmt::print("fastest: in process {:.1f} ms, cluster {:.1f} ms\n", *std::min_element(local_ms.begin(), local_ms.end()),
             *std::min_element(remote_ms.begin(), remote_ms.end()));
  fmt::print("cluster TTFT minus the prefill time of its own engine, median: {:.1f} ms\n", Median(around_ms));
  cluster->Stop();
  return absl::OkStatus();
}

}  // namespace
}  // namespace spl

int main(int argc, char** argv) {
  spl::log::SetLevel(spl::log::Level::kWarning);
  const int prompt_tokens = argc > 1 ? std::atoi(argv[1]) : 4096, rounds = argc > 2 ? std::atoi(argv[2]) : 7;
  if (prompt_tokens < 1 || rounds < 1) {
    fmt::print(stderr, "usage: splice_ttft_bench [prompt tokens] [rounds]\n");
    return 2;
  }
  const absl::Status status = spl::Run(prompt_tokens, rounds);
  if (status.ok()) return 0;
  fmt::print(stderr, "splice_ttft_bench: {}\n", spl::MessageOf(status));
  return 1;
}
