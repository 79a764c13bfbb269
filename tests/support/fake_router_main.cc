// A router over one fake prefill and one fake decode worker, until stdin closes: for trying clients by hand or script.
//
//   fake_router            the bundled model; answers have 24 tokens
//   fake_router TEMPLATE   with this chat template; an answer is its prompt
#include <cstdio>

#include "tests/support/fake_cluster.h"
#include "tests/support/temp_dir.h"
#include "tests/support/template_model.h"

int main(int argc, char** argv) {
  const spl::testing::TempDir dir;
  spl::testing::FakeCluster cluster(1, 1);
  cluster.fabric.answer_tokens = argc > 1 ? 0 : 24;
  cluster.fabric.answers_once = true;
  if (argc > 1) {
    spl::testing::MakeTemplateModel(dir, argv[1]);
    cluster.options.model_dir = dir.path();
    cluster.options.served_model_name = "echo";
  }
  cluster.StartRouter();
  std::printf("%s\n", cluster.http().c_str());
  std::fflush(stdout);
  while (std::getchar() != EOF) {
  }
  return 0;
}
