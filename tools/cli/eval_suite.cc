#include "tools/cli/eval_suite.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "services/base/status.h"
#include "services/methods/methods.h"

namespace spl::cli {

namespace {

EvalSuite RecoverySuite(int32_t num_layers) {
  EvalSuite suite{.reuse = {"exact", "sparsex:probe_layers=0"}, .decode = {"auto"}};
  int32_t last = 0;
  for (const int32_t sixths : {3, 4, 5, 6}) {
    const int32_t probe = std::max(1, num_layers * sixths / 6);
    if (std::exchange(last, probe) == probe) continue;
    for (const char* share : {"0.05", "0.1", "0.15"})
      suite.reuse.push_back(
          fmt::format("sparsex:probe_layers={}:score_layers={}:recompute_share={}", probe, (probe + 1) / 2, share));
  }
  return suite;
}

}  // namespace

absl::StatusOr<EvalSuite> FindEvalSuite(const std::string& name, int32_t num_layers) {
  if (name == "recovery") {
    if (num_layers < 1) return InvalidArgument("--suite recovery needs --model: its settings depend on the layers");
    return RecoverySuite(num_layers);
  }
  if (name != "methods") return InvalidArgument("--suite {}: there are two suites, methods and recovery", name);
  // By default, methods for cold prompts leave short spans alone; here they run at every length. Bands as published,
  // 128 sinks and a window of 3,968, would be everything in a short context: from 8,192 tokens on they are that, and of
  // the same proportions over half of the context below.
  EvalSuite suite{.reuse = {"exact", "naive", "cacheblend", "epic", "sparsex", "samkv:budget_ratio=0.25", "redknot",
                            "splice", "loopserve:line_min_span=1024", "minference:line_min_span=1024",
                            "a-shape:context_share=0.5", "tri-shape:context_share=0.5"},
                  .decode = {"auto"}};
  for (const methods::Selector& selector : methods::Selectors()) {
    if (selector.chooses) suite.decode.push_back(std::string(selector.name) + ":context_share=0.0625");
  }
  return suite;
}

}  // namespace spl::cli
