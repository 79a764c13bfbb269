#include "tools/cli/eval_suite.h"

#include "services/base/status.h"
#include "services/methods/methods.h"

namespace spl::cli {

absl::StatusOr<EvalSuite> FindEvalSuite(const std::string& name) {
  if (name != "methods") return InvalidArgument("--suite {}: there is one suite, methods", name);
  // By default, methods for cold prompts leave short spans alone; here they run at every length.
  EvalSuite suite{.reuse = {"exact", "naive", "cacheblend", "epic", "sparsex", "samkv:budget_ratio=0.25", "redknot",
                            "splice", "loopserve:line_min_span=1024", "minference:line_min_span=1024",
                            "a-shape:band_window=1024", "tri-shape:band_window=1024"},
                  .decode = {"auto"}};
  for (const methods::Selector& selector : methods::Selectors()) {
    if (selector.chooses) suite.decode.push_back(std::string(selector.name) + ":context_share=0.0625");
  }
  return suite;
}

}  // namespace spl::cli
