// A program that dies of a signal says where: the stack reaches from the place of the signal to the start of the
// thread.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>

#include "tests/cluster/processes.h"
#include "tests/support/paths.h"

namespace spl::test {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

TEST(CrashHandler, EveryProgramPrintsItsStack) {
  const auto cluster = ProcessCluster::Start({.model_dir = kTinyModel,
                                              .prefill_flags = {"--kv-bytes", "64MiB", "--threads", "1"},
                                              .decode_flags = {"--kv-bytes", "64MiB", "--threads", "1"},
                                              .router_flags = {}});
  ASSERT_NE(cluster, nullptr);
  for (Process* const process :
       {cluster->router.get(), cluster->prefill[0].get(), cluster->decode[0].get(), cluster->store.get()}) {
    process->Signal(SIGSEGV);
    EXPECT_EQ(process->WaitForExit(), 128 + SIGSEGV);
    // The thread that takes the signal is any of them.
    EXPECT_THAT(process->Stderr(),
                AllOf(HasSubstr("*** SIGSEGV received"), ContainsRegex(" (main|start_thread|clone3?|__clone)\n")));
  }
}

}  // namespace
}  // namespace spl::test
