// A router over one fake prefill and one fake decode worker, until stdin closes: for trying clients by hand or script.
#include <cstdio>

#include "tests/support/fake_cluster.h"

int main() {
  spl::testing::FakeCluster cluster(1, 1);
  cluster.fabric.answer_tokens = 24;
  cluster.StartRouter();
  std::printf("%s\n", cluster.http().c_str());
  std::fflush(stdout);
  while (std::getchar() != EOF) {
  }
  return 0;
}
